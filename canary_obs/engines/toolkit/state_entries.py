"""Requests that keep one state each (Mamba, linear attention), which every forward overwrites in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canary_kernels.layout import CHAIN_ANCHOR, signed
from canary_obs.engine_api.views import GroupTokens, StepTypes


class StateEntries:
    """What a forward adds to a group of states: one entry per request, at position 0 and without a prefix.

    The bytes that it overwrites are compared with what the forward before left, and those that it leaves get
    a new record. Memory is allocated once.
    """

    def __init__(self, max_requests: int, types: StepTypes, device: Any) -> None:
        def column(dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((max_requests,), value, dtype=dtype, device=device)

        self._zeros, self._ones = column(types.lengths), column(types.lengths, 1)
        self._starts = torch.arange(max_requests + 1, dtype=types.lengths, device=device)
        self._ids, self._positions = column(types.input_ids), column(types.positions)
        self._digests = column(torch.int64, signed(CHAIN_ANCHOR))
        self._known: dict[int, GroupTokens] = {}  # by number of requests

    def of(self, count: int) -> GroupTokens:
        """Of `count` requests; all of them have token 0."""
        if count not in self._known:
            self._known[count] = GroupTokens(
                prefix_lens=self._zeros[:count], extend_lens=self._ones[:count],
                token_starts=self._starts[: count + 1], input_ids=self._ids[:count],
                positions=self._positions[:count], digests=self._digests[:count],
            )  # fmt: skip
        return self._known[count]
