"""Digests of token ids that only the device knows: asynchronous scheduling, rejected drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_kernels.hashing import mix64
from canary_kernels.layout import CHAIN_ANCHOR, signed

if TYPE_CHECKING:
    import numpy as np

_ANCHOR = signed(CHAIN_ANCHOR)


class DeviceDigests:
    """The chain over each request's computed tokens, by the request's place in vLLM's state arrays.

    Each step adds what became computed since the request's last step: at most the tokens it was given
    then, of which rejected ones are left out on the device. Nothing waits for the device.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._digests = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._counts = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._given = torch.zeros(max_requests, dtype=torch.int64, device=device)  # tokens of the last step
        self._bounds: dict[str, int] = {}  # host's upper bound of the same, by request
        self._new: dict[str, tuple[int, int]] = {}  # request -> tokens, digest

    def begin(self, request: str, cached: Sequence[int]) -> None:
        """A request starts, or starts again, behind these tokens."""
        ids = torch.tensor(cached, dtype=torch.int64)
        digest = _ANCHOR + int(mix64(ids, torch.arange(ids.numel())).sum()) if cached else _ANCHOR
        self._new[request] = ids.numel(), signed(digest)
        self._bounds.pop(request, None)

    def advance(
        self, requests: Sequence[str], index: Tensor, tokens: Tensor, computed: Tensor, extend: Tensor,
        bounds: np.ndarray[tuple[int], np.dtype[np.signedinteger]],
    ) -> Tensor:  # fmt: skip
        """int64 [n]: the chain over the first computed[i] ids of row index[i] of `tokens`."""
        device = self._digests.device
        for place, request in enumerate(requests):
            if start := self._new.pop(request, None):
                fresh = torch.tensor([*start, 0], dtype=torch.int64).to(device, non_blocking=True)
                here = index[place : place + 1]
                for column, value in zip((self._counts, self._digests, self._given), fresh, strict=True):
                    column.index_copy_(0, here, value[None])
        total = sum(self._bounds.get(request, 0) for request in requests)
        if total:
            self._add(index, tokens, computed, total)
        self._counts[index] = computed.long()
        self._given[index] = extend.long()
        for request, bound in zip(requests, bounds.tolist(), strict=False):
            self._bounds[request] = bound
        return self._digests[index]

    def _add(self, index: Tensor, tokens: Tensor, computed: Tensor, total: int) -> None:
        given = self._given[index]
        ends = given.cumsum(0)
        places = torch.arange(total, device=index.device)
        # The host's total may be too high: what lies behind the last end is nobody's.
        which = torch.searchsorted(ends, places, right=True).clamp_(max=index.shape[0] - 1)
        rows = index[which]
        positions = self._counts[rows] + places - (ends - given)[which]
        accepted = (places < ends[-1]) & (positions < computed[which])
        ids = tokens[rows, positions.clamp(max=tokens.shape[1] - 1)].long()
        self._digests.index_add_(0, rows, mix64(ids, positions).where(accepted, 0))

    def forget(self, requests: Iterable[str]) -> None:
        """These ended."""
        for request in requests:
            self._bounds.pop(request, None)
            self._new.pop(request, None)
