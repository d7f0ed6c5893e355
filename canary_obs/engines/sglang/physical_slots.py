"""Slots of unified memory: the request table has virtual numbers of them, which stay when KV is moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def buffer_of(pool: Any) -> Any:
    """The buffer that a pool, or a part of one, shares; None = it has memory of its own."""
    own = getattr(pool, "unified_buffer", None) or getattr(pool, "_unified_buffer", None)
    return own or getattr(getattr(pool, "full_kv_pool", None), "_unified_buffer", None)


def is_unified(pool: Any) -> bool:
    """Whether a pool, or a part of one, lies in unified memory."""
    return buffer_of(pool) is not None


def physical_loc(pool: Any, slots: Tensor) -> Any:
    """The slots (int64 [n]) as this pool's `set_kv_buffer` takes them."""
    if not is_unified(pool):
        return slots
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    return KVWriteLoc(slots, physical=True)


def covers_last(pool: Any, page_size: int) -> bool:
    """Whether the first slot of another part of the buffer has bytes of the last full slot of page 0."""
    sizes = {spec.name: int(spec.entry_bytes()) for spec in buffer_of(pool).sub_pool_specs}
    full = sizes.pop("full")
    return max(sizes.values()) > (page_size - 1) * full


def held_bytes(pool: Any) -> int:
    """Of the tensors of K and V; bytes that two groups use in turn count for both."""
    parts = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)]
    tensors = [
        tensor
        for part in parts
        for name in ("k_buffer", "v_buffer", "kv_buffer")
        for tensor in getattr(part, name, ())
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pool_bytes(pool: Any) -> int:
    """Bytes of K and V that a pool says it has."""
    if is_unified(pool):
        return held_bytes(pool)  # SGLang says 0
    size = pool.get_kv_size_bytes()
    return int(sum(size) if isinstance(size, tuple) else size)


class PhysicalSlots:
    """A group's own slots by the virtual ones of the request table, indexed like a tensor of them."""

    def __init__(self, allocator: Any) -> None:
        """`allocator`: of the group's slots; its tables are read each time, as they change in place."""
        self._allocator, self._page_size = allocator, int(allocator.page_size)

    def __getitem__(self, virtual: Tensor) -> Tensor:
        """int64, of the same shape; 0 = none, also for numbers that there are not, as SGLang takes them."""
        virtual, table = virtual.to(torch.int64), self._allocator.virtual_to_physical
        numbers = virtual.div(self._page_size, rounding_mode="floor")
        # The last place stands for -1.
        pages = table[torch.where((numbers >= 0) & (numbers < table.numel()), numbers, -1)]
        found: Tensor = torch.where(pages > 0, pages * self._page_size + virtual % self._page_size, 0)
        return found

    def virtual(self, slots: Tensor) -> Tensor:
        """int64 [n]: the virtual slots of these; 0 = none."""
        pages = self._allocator.physical_to_virtual[slots // self._page_size]
        found: Tensor = torch.where(pages > 0, pages * self._page_size + slots % self._page_size, 0)
        return found

    def all_virtual(self) -> Tensor:
        """int64 [n]: those that have a slot now; without page 0, which takes the writes of padded tokens."""
        # The last place stands for -1.
        pages: Tensor = (self._allocator.virtual_to_physical[:-1] > 0).nonzero().flatten()
        return (pages[:, None] * self._page_size + torch.arange(self._page_size)).flatten()


def physical_slots(group: Any) -> PhysicalSlots | None:
    """Those of a group of the request table's slots; None = it is not in unified memory."""
    own = group.own_slots
    return own if isinstance(own, PhysicalSlots) else None
