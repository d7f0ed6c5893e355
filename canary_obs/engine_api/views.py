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
    uncovered_bytes: int = 0  # of each slot, in layers that no source shows: they lower the coverage


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """What a group's slots hold when that is not the forward's own tokens, one slot each.

    Compressed pools: one entry per run of tokens. Draft pools: slot p holds the token of position p + 1.
    Request i of every tensor is request i of the forward; lengths and positions count this group's entries.
    """

    prefix_lens: Tensor  # [num_requests]; entries cached before this forward
    extend_lens: Tensor  # [num_requests]; entries added
    token_starts: Tensor  # [num_requests + 1]; exclusive prefix sum of extend_lens
    input_ids: Tensor  # [num_entries]; the token, or a stand-in that depends on every token of the entry
    positions: Tensor  # [num_entries]
    digests: Tensor | None  # int64 [num_requests]; chain over the prefix entries
    expected_ids: Tensor | None = None  # [num_entries]; write oracle, -1 = unknown
    # [k * num_requests]; rows of the slot table, -1 = none; None = the forward's own. With k > 1, lengths
    # and digests are as long, and number i is of request i modulo num_requests.
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One forward's slots in one group."""

    slot_table: (
        Tensor  # int32|int64 [num_rows, width]; page numbers when the group's page_size > 1, else slots
    )
    out_slots: Tensor  # int64 [num_tokens]; -1 = skip
    tokens: GroupTokens | None = None  # None = the forward's own


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One forward. Tensors live on the engine's device; padding requests have row -1.

    `groups` names the groups that this forward reads and writes: a draft model's forward names its own.
    """

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
class WindowTokens:
    """Live tokens of the full groups, by what the sliding-window groups have for them.

    Counted for each full group beside each sliding-window group; of several pairs the least.
    """

    full: tuple[str, ...]  # names of the groups
    windowed: tuple[str, ...]
    out_of_window: int  # nothing any more
    diverging: int  # a slot of another number


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
