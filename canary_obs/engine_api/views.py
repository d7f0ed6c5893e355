"""The data of the contract: KV groups, and forwards as views of the engine's own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from canary_kernels.buffers import KVSource
    from canary_obs.engine_api.launches import ForwardLaunches


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """Layers that share slot numbers."""

    name: str  # "full", "swa", "c4", ...
    num_slots: int
    page_size: int
    sources: Sequence[KVSource]  # one per layer and part; empty = bytes are not checked
    window: int | None = None  # sliding window in tokens
    uncovered_bytes: int = 0  # per slot, in layers without a source; they lower the coverage

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all layers; of slots spread over ranks, what this rank has of one on average."""
        ranks = self.sources[0].sharding.ranks if self.sources else 1
        return sum(source.slot_bytes for source in self.sources) // ranks + self.uncovered_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """The entries of a group whose slots do not hold one token of the forward each.

    Compressed pools: one entry per run of tokens. Draft pools: slot p holds the token of position p + 1.
    Request i of every tensor is request i of the forward; lengths and positions are in entries.
    """

    prefix_lens: Tensor  # [num_requests]; entries cached before this forward
    extend_lens: Tensor  # [num_requests]; entries added
    token_starts: Tensor  # [num_requests + 1]; exclusive prefix sum of extend_lens
    input_ids: Tensor  # [num_entries]; the token, or a surrogate that depends on every token of the entry
    positions: Tensor  # [num_entries]
    digests: Tensor | None  # int64 [num_requests]; chain over the prefix entries
    expected_ids: Tensor | None = None  # [num_entries]; write oracle, -1 = unknown
    known_lens: Tensor | None = None  # int64 [num_requests]; entries that the scheduler knows, -1 = nothing
    known_digests: Tensor | None = None  # int64 [num_requests]; chain over them
    # [k * num_requests]; rows of the slot table, -1 = none; None = the forward's own. With k > 1, lengths and
    # digests are as long, and entry i belongs to request i modulo num_requests.
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
    """One forward. Tensors are on the engine's device; padding requests have row -1.

    `groups` holds the groups that this forward reads and writes; a draft model's forward has its own.
    """

    request_ids: Sequence[str]  # in the order of the batch
    rows: Tensor  # [num_requests]; row of every group's slot table
    prefix_lens: Tensor  # [num_requests]; tokens cached before this forward
    extend_lens: Tensor  # [num_requests]; tokens added
    token_starts: Tensor  # [num_requests + 1]; exclusive prefix sum of extend_lens
    input_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    digests: Tensor | None  # int64 [num_requests]; chain over the engine's own prefix tokens
    groups: dict[str, GroupStep]
    expected_ids: Tensor | None = None  # [num_tokens]; write oracle, -1 = unknown
    # What the scheduler knows of each request: its first tokens, and the chain over them. The tail compares
    # it with what was written, in groups that hold the forward's own tokens.
    known_lens: Tensor | None = None  # int64 [num_requests]; -1 = nothing
    known_digests: Tensor | None = None  # int64 [num_requests]
    launches: ForwardLaunches | None = None  # what fills these tensors; None = they are filled


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSlots:
    """The slots of one group in the prefix cache, in any order; int64 on the CPU."""

    slots: Tensor  # [n]
    positions: Tensor  # [n]
    previous: Tensor  # [n]; slot of the position before; -1 = none, or no longer in its window


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAllocation:
    """What an engine has, by its own configuration and memory: groups are compared with it."""

    # Of KV, without padding, on this rank. Memory that several groups use in turn counts for each of them.
    bytes: int
    # Group names -> layers that these groups hold together, by the model's configuration.
    layers: Mapping[tuple[str, ...], int]
    # What no group shows because it cannot be checked, each with its share and the reason: `degraded`.
    left_out: tuple[str, ...] = ()


class CachedCount(NamedTuple):
    """What an engine counts of one group's slots in its prefix cache."""

    slots: int  # in the cache now
    removed: int  # taken out of it since the engine's start; may count more, such as slots never cached


class ComparedTables(NamedTuple):
    """What an adapter counts of one group's tables."""

    forwards: int  # where the view has what attention was given, since attach
    gap: str | None  # why the last other one could not be compared; None = there was none


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTokens:
    """Live tokens of the full groups, by what the sliding-window groups hold for them.

    Counted for each pair of a full and a sliding-window group; the least of all pairs.
    """

    full: tuple[str, ...]  # group names
    windowed: tuple[str, ...]
    out_of_window: int  # no slot any more
    diverging: int  # a slot with another number


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTypes:
    """Dtypes of a StepView's tensors, where an adapter knows them before the first forward."""

    slot_table: torch.dtype
    rows: torch.dtype
    lengths: torch.dtype  # prefix_lens, extend_lens and token_starts
    input_ids: torch.dtype
    positions: torch.dtype
    out_slots: torch.dtype
    has_digests: bool
    expected_ids: torch.dtype | None
    has_known_tokens: bool = False
