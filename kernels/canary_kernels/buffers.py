"""What the operations read and write: buffers of a group, one forward as rows, and where KV bytes lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from canary_kernels.layout import COUNTER_WORDS, NUM_LANES, RECORD_WORDS, ROW_WORDS, Part, Plane

DEFAULT_LANE_ROWS = 32
SHARED_SLOTS = 256  # the most of a list whose slots several programs read
SHARE_WORDS = 3  # of a slot: sums of K and V, and how many programs have come
COMPARISON_ROW, COMPLETION_ROW = 0, 1  # of GroupBuffers.shares
_SUM_CHUNKS = (
    1024  # of a forward's new tokens, as the write cuts them; sums of chunks after those are not published
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuffers:
    """Device memory of one group. Allocated once at attach; operations never allocate state.

    Where rows are long, a stream's first comparison besides forwards allocates shares for it, in `cache`.
    """

    records: Tensor  # int64 [num_slots, RECORD_WORDS]; zeros = EMPTY
    counters: Tensor  # int64 [COUNTER_WORDS]; monotonic
    violations: Tensor  # int64 [NUM_LANES, lane_rows, ROW_WORDS]
    clock: Tensor  # int64 [1]; step << TICK_BITS | tick, stamped into violation rows; shared by all groups
    # int64 [1 + chunks, 2], from allocate_sums: sums that the write's programs publish; None = they do not.
    sums: Tensor | None = None
    # Two int64 [SHARED_SLOTS, SHARE_WORDS], from allocate_shares: where the programs that read one slot sum
    # it up, of a forward's comparison and completion; None = one program reads a slot.
    shares: tuple[Tensor, ...] | None = None
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    # By operation: arguments already checked, kernels ready to launch.

    @property
    def num_slots(self) -> int:
        """Slots that have a record."""
        return self.records.shape[0]


def allocate_buffers(num_slots: int, clock: Tensor, lane_rows: int = DEFAULT_LANE_ROWS) -> GroupBuffers:
    """Zeroed buffers on the clock's device: RECORD_BYTES per slot, counters, and the violation log."""
    device = clock.device
    return GroupBuffers(
        records=torch.zeros((num_slots, RECORD_WORDS), dtype=torch.int64, device=device),
        counters=torch.zeros(COUNTER_WORDS, dtype=torch.int64, device=device),
        violations=torch.zeros((NUM_LANES, lane_rows, ROW_WORDS), dtype=torch.int64, device=device),
        clock=clock,
        sums=allocate_sums(device),
        shares=allocate_shares(device),
    )


def allocate_shares(device: torch.device) -> tuple[Tensor, ...]:
    """Zeroed scratch of one group: no two of its forwards are compared, or completed, at once."""
    return torch.zeros((2, SHARED_SLOTS, SHARE_WORDS), dtype=torch.int64, device=device).unbind()


def allocate_sums(device: torch.device) -> Tensor:
    """Zeroed scratch of one group's write, which is never launched on two streams at once."""
    return torch.zeros((1 + _SUM_CHUNKS, 2), dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """One forward as one group sees it. Lengths are read on the device; integers may be int32 or int64."""

    slot_table: Tensor  # [num_rows, width]; page numbers when page_size > 1, else slots
    page_size: int
    rows: Tensor  # [num_requests]; row of slot_table; -1 = padding, ignored
    starts: Tensor  # [num_requests]; first position to verify (0, or the window's first)
    prefix_lens: Tensor  # [num_requests]; tokens in the cache before this forward
    extend_lens: Tensor  # [num_requests]; tokens this forward adds
    token_starts: Tensor  # [num_requests + 1]; exclusive prefix sum of extend_lens
    digests: (
        Tensor | None
    )  # int64 [num_requests]; chain over the engine's own prefix tokens, None = no oracle
    input_ids: Tensor  # [num_tokens]; may be longer than token_starts[-1]: the rest is padding
    positions: Tensor  # [num_tokens]; positions the model is given
    out_slots: Tensor  # [num_tokens]; where the forward writes; -1 = skip
    expected_ids: Tensor | None = None  # [num_tokens]; write oracle; -1 = unknown, None = no oracle
    # What the scheduler knows of each request: its first tokens, and the chain over them. Both or neither.
    known_lens: Tensor | None = None  # [num_requests]; <= 0 = nothing
    known_digests: Tensor | None = None  # int64 [num_requests]
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    # By operation: arguments already checked, addresses.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Slots numbered over several ranks, of which each rank has the bytes of every so many.

    `interleave` slots lie on one rank, the next ones on the next rank. A slot of another rank hashes to 0.
    """

    ranks: int = 1
    rank: int = 0
    interleave: int = 1

    @property
    def first(self) -> int:
        """The first slot that this rank holds."""
        return self.rank * self.interleave

    def holds(self, slot: int) -> bool:
        """Whether this rank has the slot's bytes."""
        return slot // self.interleave % self.ranks == self.rank

    def local(self, slot: int) -> int:
        """The number, among this rank's slots, of one that it holds."""
        return slot // (self.interleave * self.ranks) * self.interleave + slot % self.interleave


WHOLE = Sharding()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Where one layer's K or V bytes of a slot lie, and which words of the whole model they are.

    Byte b of head h of slot s (its number on this rank, see `sharding`), with t = s % page_size and
    c = b % band_bytes: base + h * head_stride
    + s // page_size * page_stride + t // tile_size * tile_stride + t % tile_size * slot_stride
    + b // band_bytes * band_stride + c // element_bytes * element_stride + c % element_bytes.
    It belongs to word plane * PLANE_WORDS + (h * head_bytes + b) // 4 of the layer and part, h global.
    Scales held apart from their data are a plane of their own; scales within a head's bytes are part of them.
    """

    tensor: Tensor  # any dtype; its data_ptr() is the base
    part: Part  # K or V
    layer: int  # global layer index
    head_start: int  # global index of the first head held here
    num_heads: int
    head_bytes: int
    page_size: int
    page_stride: int
    slot_stride: int
    head_stride: int
    element_bytes: int  # equals head_bytes when a head's bytes are contiguous
    element_stride: int
    tile_size: int = 0  # slots of a page that lie slot_stride apart; 0 = all of them
    tile_stride: int = 0
    band_bytes: int = 0  # bytes of a head whose elements lie element_stride apart; 0 = all of them
    band_stride: int = 0
    plane: Plane = Plane.DATA
    sharding: Sharding = WHOLE  # the same for all sources of a group

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in this source, where it holds the slot."""
        return self.num_heads * self.head_bytes


def source_from_tensor(
    tensor: Tensor, part: Part, layer: int, head_start: int = 0, plane: Plane = Plane.DATA
) -> KVSource:
    """Common layouts: [slots, heads, dim] or [pages, page_size, heads, dim], any strides, dim contiguous."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise ValueError(
            f"KV tensor of layer {layer} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "expected [slots, heads, dim] or [pages, page_size, heads, dim] with a contiguous last axis; "
            "describe other layouts with KVSource directly"
        )
    size = tensor.element_size()
    page_stride, slot_stride, head_stride, _ = (stride * size for stride in tensor.stride())
    head_bytes = tensor.shape[3] * size
    return KVSource(
        tensor=tensor,
        part=part,
        layer=layer,
        head_start=head_start,
        num_heads=tensor.shape[2],
        head_bytes=head_bytes,
        page_size=tensor.shape[1],
        page_stride=page_stride,
        slot_stride=slot_stride,
        head_stride=head_stride,
        element_bytes=head_bytes,
        element_stride=head_bytes,
        plane=plane,
    )
