"""What the decode operation reads and keeps: a batch that decodes or verifies drafts, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Known(IntEnum):
    """What the host's columns of a step are."""

    GIVEN = 0  # digests, known lengths and known digests
    NEXT = 1  # tokens: of each request the one that this forward is fed
    NEXT_BEFORE = 2  # the same, where the forward is fed a token later than that


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMemory:
    """Allocated once; the batch under way has the first places of each."""

    table: Tensor  # [max_requests, width]; row i has the slots of request i, up to its length
    prefix_lens: Tensor  # int64 [max_requests]
    tokens: Tensor  # int64 [3, max_requests * most_added]; input ids, positions, slots of the new tokens
    known: Tensor  # int64 [3, max_requests]; digests, known_lens, known_digests, as of a StepView
    # Slots in the window group, if there is one: as `table`, and of the new tokens, int64
    # [max_requests * most_added].
    windows: Tensor | None = None
    window_slots: Tensor | None = None
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def allocate(cls, table: Tensor, *, windows: bool = False, most_added: int = 1) -> DecodeMemory:
        """For an engine's slot table; `windows`: a window group has other slots than those in it.

        `most_added`: tokens of each request that a forward adds.
        """
        most, device = int(table.shape[0]), table.device
        tokens = most * most_added
        return cls(
            table=torch.zeros_like(table),
            prefix_lens=torch.zeros(most, dtype=torch.int64, device=device),
            tokens=torch.zeros((3, tokens), dtype=torch.int64, device=device),
            known=torch.zeros((3, most), dtype=torch.int64, device=device),
            windows=torch.zeros_like(table) if windows else None,
            window_slots=torch.zeros(tokens, dtype=torch.int64, device=device) if windows else None,
        )


class DecodeStep(NamedTuple):
    """A forward that is fed as many tokens of each request: one, or the drafts that it verifies. Integers."""

    table: Tensor  # [num_rows, width]; contiguous last axis
    rows: Tensor  # [num_requests]; row of the table
    seq_lens: Tensor  # [num_requests]; with the new tokens, but for `ahead` of them of each
    input_ids: Tensor  # [num_requests * added]
    positions: Tensor  # [num_requests * added]
    out_slots: Tensor  # [num_requests * added]
    host: Tensor  # int64 [3, max_requests], contiguous, in memory that the device reads; see Known
    # int64 [n]; by slot of the table, that in the window group (0 = none); the last place stands for all
    # other numbers. None = there is no such group.
    window_slots: Tensor | None = None
    added: int = 1  # new tokens of each request
    ahead: int = 0  # of these, so many are not in `seq_lens`
