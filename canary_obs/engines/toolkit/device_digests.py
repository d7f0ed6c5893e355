"""Chain digests of token ids that the host learns too late: asynchronous scheduling, rejected drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.checks import Backend
from canary_kernels.digest import DigestMemory, InputTokens, TokenLists, follow_inputs, follow_lists
from canary_kernels.forward_start import RING_ROWS
from canary_kernels.hashing import mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR, signed

_Ints = NDArray[np.signedinteger[Any]]


def backend_for(device: torch.device) -> Backend:
    """The backend that computes digests on a device."""
    return Backend.TRITON if device.type == "cuda" else Backend.TORCH


class ListDigests:
    """The chain over token lists that the engine keeps on the device, one row per request."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self.memory = DigestMemory.allocate(max_requests, device)
        self._backend = backend_for(device)
        self.started: list[str] = []  # since the last `begin`

    def start_request(self, request: str) -> None:
        """A request starts or restarts: its row held another request's tokens until now."""
        self.started.append(request)

    def begin(self, rows: dict[str, int]) -> None:
        """A batch is next. `rows`: row of each request in the token lists."""
        if self.started:
            for request in self.started:
                if (row := rows.get(request)) is not None:
                    self.memory.counts[row : row + 1].zero_()
            self.started.clear()

    def following(self, lists: TokenLists) -> Callable[[], None]:
        """What writes digests, prefix and extend lengths of a batch to `memory`; one launch."""
        return partial(follow_lists, self._backend, self.memory, lists)


class InputDigests:
    """The chain over the input ids of each request's steps, where the newest ids are on the device only.

    A request that does not continue at the end of its last step restarts from the host's list, which must be
    complete up to there. With speculative decoding the host's counts include drafts that were rejected
    meanwhile; the device's counts do not.
    """

    def __init__(self, max_requests: int, device: torch.device, drafts: int = 0) -> None:
        """`drafts`: most tokens per request and step that may be rejected."""
        self.memory = DigestMemory.allocate(max_requests, device, drafts)
        self._drafts = drafts
        self._backend = backend_for(device)
        self._places = torch.zeros((3, max_requests), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._staging = cycle(
            [torch.zeros((3, max_requests), dtype=torch.int64, pin_memory=pinned) for _ in range(RING_ROWS)]
        )
        self._requests: list[str] = []  # of the last batch
        self._rows: list[int] = []
        self._ends = np.zeros(0, dtype=np.int64)  # tokens in the digest; -1 = none yet

    def forget(self, requests: Iterable[str]) -> None:
        """These requests ended, or have other tokens from now on."""
        for request in requests:
            if request in self._requests:
                self._ends[self._requests.index(request)] = -1

    def set_batch(self, requests: list[str], tokens: _Ints, computed: _Ints, scheduled: _Ints) -> None:
        """The requests of the next step, before it.

        Host lists tokens int [n, width]; tokens computed before and scheduled in the step, int [n] each.
        """
        # As a rule they go on where they ended: equal bytes are equal numbers, and cost no NumPy operation.
        same = requests == self._requests and computed.tobytes() == self._ends.tobytes()
        if not same and (requests != self._requests or not self._continues(self._ends, computed).all()):
            self._assign_rows(requests, tokens, computed)
        self._ends = computed + scheduled

    def following(
        self, count: int, input_ids: Tensor, token_starts: Tensor, prefix_lens: Tensor
    ) -> tuple[Callable[[], None], Tensor]:
        """For batches of so many requests in these tensors: what follows one, to be launched once for each
        `set_batch`; and its result, int64 [count]: the chain over the computed ids of each request.
        """
        fed = InputTokens(
            places=self._places[:, :count], input_ids=input_ids, token_starts=token_starts,
            prefix_lens=prefix_lens,
        )  # fmt: skip
        return partial(follow_inputs, self._backend, self.memory, fed), self.memory.digests[:count]

    def _continues(self, ended: Any, computed: Any) -> Any:
        return (computed <= ended) & (ended <= computed + self._drafts)

    def _assign_rows(self, requests: list[str], tokens: _Ints, computed: _Ints) -> None:
        """Give each request of this batch a row, and a digest to those that do not continue."""
        known = dict(zip(self._requests, zip(self._rows, self._ends.tolist(), strict=True), strict=True))
        free = set(range(self._places.shape[1])) - {
            known[request][0] for request in requests if request in known
        }
        staging = next(self._staging)
        columns = staging.numpy()
        rows = []
        for place, (request, end) in enumerate(zip(requests, computed.tolist(), strict=True)):
            row, ended = known[request] if request in known else (free.pop(), -1)
            fresh = not self._continues(ended, end)
            columns[:, place] = row, fresh, _chain(tokens[place, :end]) if fresh else 0
            rows.append(row)
        self._places.copy_(staging, non_blocking=True)
        self._requests, self._rows = requests, rows


def _chain(tokens: _Ints) -> int:
    mixed = mix_arrays(tokens, np.arange(tokens.shape[0])).sum()
    return signed(int(mixed) + CHAIN_ANCHOR)
