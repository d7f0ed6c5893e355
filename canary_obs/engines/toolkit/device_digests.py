"""Digests of token ids that only the device knows in time: asynchronous scheduling, rejected drafts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.checks import Backend
from canary_kernels.digest import DigestMemory, InputTokens, TokenLists, follow_inputs, follow_lists
from canary_kernels.hashing import mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR, signed

_Ints = NDArray[np.signedinteger[Any]]
# vLLM prepares a step only when the one before it has taken its inputs: two would do.
_STAGES = 4


def backend_for(device: torch.device) -> Backend:
    """How digests are followed on a device."""
    return Backend.TRITON if device.type == "cuda" else Backend.TORCH


class ListDigests:
    """The chain over vLLM's own token lists, by the request's row in its state arrays."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self.memory = DigestMemory.allocate(max_requests, device)
        self._backend = backend_for(device)
        self._begun: list[str] = []

    def begin(self, request: str) -> None:
        """A request starts, or starts again: its row is another's, or holds other tokens."""
        self._begun.append(request)

    def advance(self, rows: dict[str, int], lists: TokenLists) -> None:
        """Digests, prefix and extend lengths of the batch into the memory; one launch."""
        for request in self._begun:
            if (row := rows.get(request)) is not None:
                self.memory.counts[row : row + 1].zero_()
        self._begun.clear()
        follow_lists(self._backend, self.memory, lists)


class InputDigests:
    """The chain over what each request was fed, for a runner whose newest ids are on the device only.

    A request that does not go on where its last step ended starts over from the runner's host list, which
    is complete up to there then: the scheduler sends the ids of requests that come back. With drafts, the
    host's counts run ahead by what was rejected meanwhile; the device's are right.
    """

    def __init__(self, max_requests: int, device: torch.device, drafts: int = 0) -> None:
        """`drafts`: tokens that may be rejected, per request and step."""
        self.memory = DigestMemory.allocate(max_requests, device, drafts)
        self._drafts = drafts
        self._backend = backend_for(device)
        self._places = torch.zeros((3, max_requests), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._stages = cycle(
            [torch.zeros((3, max_requests), dtype=torch.int64, pin_memory=pinned) for _ in range(_STAGES)]
        )
        self._requests: list[str] = []  # of the last step
        self._rows: list[int] = []
        self._ends = np.zeros(0, dtype=np.int64)  # tokens fed, by place

    def forget(self, requests: Iterable[str]) -> None:
        """These ids ended, or stand for other tokens from now on."""
        for request in requests:
            if request in self._requests:
                self._ends[self._requests.index(request)] = -1

    def seat(self, requests: list[str], tokens: _Ints, computed: _Ints, scheduled: _Ints) -> None:
        """The batch of a step: host lists int [n, width], tokens computed and scheduled, int [n] each."""
        if requests != self._requests or not self._goes_on(self._ends, computed).all():
            self._reseat(requests, tokens, computed)
        self._ends = computed + scheduled

    def follow(self, input_ids: Tensor, token_starts: Tensor, prefix_lens: Tensor) -> Tensor:
        """int64 [n]: the chain over the computed ids of each request seated; one launch."""
        count = len(self._requests)
        fed = InputTokens(
            places=self._places[:, :count],
            input_ids=input_ids,
            token_starts=token_starts,
            prefix_lens=prefix_lens,
        )
        follow_inputs(self._backend, self.memory, fed)
        return self.memory.digests[:count]

    def _goes_on(self, ended: Any, computed: Any) -> Any:
        return (computed <= ended) & (ended <= computed + self._drafts)

    def _reseat(self, requests: list[str], tokens: _Ints, computed: _Ints) -> None:
        """Rows for the requests of this batch, and where those that do not go on start."""
        known = dict(zip(self._requests, zip(self._rows, self._ends.tolist(), strict=True), strict=True))
        free = set(range(self._places.shape[1])) - {
            known[request][0] for request in requests if request in known
        }
        stage = next(self._stages)
        columns = stage.numpy()
        rows = []
        for place, (request, end) in enumerate(zip(requests, computed.tolist(), strict=True)):
            row, ended = known[request] if request in known else (free.pop(), -1)
            fresh = not self._goes_on(ended, end)
            columns[:, place] = row, fresh, _chain(tokens[place, :end]) if fresh else 0
            rows.append(row)
        self._places.copy_(stage, non_blocking=True)
        self._requests, self._rows = requests, rows


def _chain(tokens: _Ints) -> int:
    mixed = mix_arrays(tokens, np.arange(tokens.shape[0])).sum()
    return signed(int(mixed) + CHAIN_ANCHOR)
