"""What an engine shows the canary: its groups once, each forward as views of its own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from canary_kernels.buffers import KVSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Layers that share one slot numbering."""

    name: str  # "full", "swa", "c4", ...
    num_slots: int
    page_size: int
    sources: Sequence[KVSource]  # one per layer and part; empty = bytes not covered
    window: int | None = None  # sliding window in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One forward's slots in one group."""

    slot_table: (
        Tensor  # int32|int64 [num_rows, width]; page numbers when the group's page_size > 1, else slots
    )
    out_slots: Tensor  # int64 [num_tokens]; -1 = skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One forward. Tensors live on the engine's device; padding requests have row -1."""

    request_ids: Sequence[str]  # by position in the batch
    rows: Tensor  # [num_requests]; row of every group's slot table
    prefix_lens: Tensor  # [num_requests]; tokens cached before this forward
    extend_lens: Tensor  # [num_requests]; tokens added
    token_starts: Tensor  # [num_requests + 1]; exclusive prefix sum of extend_lens
    input_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    digests: Tensor | None  # int64 [num_requests]; chain over the engine's own prefix tokens
    groups: dict[str, GroupStep]
    expected_ids: Tensor | None = None  # [num_tokens]; write oracle, -1 = unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSlots:
    """What the prefix cache of one group held when asked. Order is free; int64 on the CPU."""

    slots: Tensor  # [n]
    positions: Tensor  # [n]
    previous: Tensor  # [n]; slot of the position before; -1 = none, or evicted from its window


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTypes:
    """Types of a StepView's tensors, for an adapter that knows them before the first forward."""

    slot_table: torch.dtype
    rows: torch.dtype
    lengths: torch.dtype  # prefix_lens, extend_lens and token_starts
    input_ids: torch.dtype
    positions: torch.dtype
    out_slots: torch.dtype
    has_digests: bool
    expected_ids: torch.dtype | None
