"""The page tables of unified memory, read as slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.physical_slots import (
    PhysicalSlots,
    buffer_of,
    covers_last,
    held_bytes,
    is_unified,
    physical_slots,
)


class Allocator:
    """As MultiEndedAllocator: page 0 takes the writes of padded tokens, the last place stands for -1."""

    free_group = None

    def __init__(self, pages: dict[int, int], page_size: int = 1, count: int = 8) -> None:
        """`pages`: physical page by virtual one."""
        self.page_size = page_size
        self.virtual_to_physical = torch.full((count + 1,), -1)
        self.physical_to_virtual = torch.full((count + 1,), -1)
        for virtual, physical in (pages | {0: 0}).items():
            self.virtual_to_physical[virtual], self.physical_to_virtual[physical] = physical, virtual

    def free(self, free_index: Any, *, _pages: Any = None) -> None:
        """Pages of virtual slots."""
        if self.free_group is not None:
            return
        pages = torch.unique(free_index // self.page_size) if _pages is None else _pages
        self.physical_to_virtual[self.virtual_to_physical[pages]] = -1
        self.virtual_to_physical[pages] = -1

    def clear(self) -> None:
        self.virtual_to_physical[1:], self.physical_to_virtual[1:] = -1, -1


def test_slots_of_pages_of_one() -> None:
    own = PhysicalSlots(Allocator({3: 5, 4: 1}))
    table = torch.tensor([[3, 4, 0], [-1, 2, 3]], dtype=torch.int32)
    assert own[table].tolist() == [[5, 1, 0], [0, 0, 5]]
    assert own[table].dtype == torch.int64
    assert own.virtual(torch.tensor([5, 1, 2, 0])).tolist() == [3, 4, 0, 0]
    assert own.all_virtual().tolist() == [3, 4]


def test_slots_of_larger_pages() -> None:
    own = PhysicalSlots(Allocator({3: 5, 4: 1}, page_size=4))
    assert own[torch.tensor([12, 15, 17, 2, 9, -1])].tolist() == [20, 23, 5, 0, 0, 0]
    assert own[torch.tensor([-24, 36, 1 << 40])].tolist() == [0, 0, 0], "there are no such numbers"
    assert own.virtual(torch.tensor([20, 23, 5, 9])).tolist() == [12, 15, 17, 0]
    assert own.all_virtual().tolist() == [*range(12, 16), *range(16, 20)]


def test_tables_are_read_each_time() -> None:
    allocator = Allocator({3: 5})
    own = PhysicalSlots(allocator)
    allocator.virtual_to_physical[3] = 7
    assert own[torch.tensor([3])].tolist() == [7]


def test_what_is_in_unified_memory() -> None:
    assert not is_unified(SimpleNamespace())
    assert not is_unified(SimpleNamespace(full_kv_pool=SimpleNamespace()))
    shared = object()
    part = SimpleNamespace(_unified_buffer=shared)
    for pool in (SimpleNamespace(unified_buffer=shared), part, SimpleNamespace(full_kv_pool=part)):
        assert is_unified(pool)
        assert buffer_of(pool) is shared
    own = PhysicalSlots(Allocator({}))
    assert physical_slots(SimpleNamespace(own_slots=own)) is own
    assert physical_slots(SimpleNamespace(own_slots=torch.zeros(3))) is None


@pytest.mark.parametrize(("other", "covers"), [(1024, True), (960, False)])
def test_whether_another_part_reaches_the_last_full_slot(other: int, covers: bool) -> None:
    sizes = {"swa": other, "full": 64}
    specs = [SimpleNamespace(name=name, entry_bytes=lambda size=size: size) for name, size in sizes.items()]
    pool = SimpleNamespace(unified_buffer=SimpleNamespace(sub_pool_specs=specs))
    assert covers_last(pool, 16) is covers


def test_bytes_that_two_groups_use_in_turn_count_for_both() -> None:
    rows = torch.zeros(100, 2, 8, dtype=torch.bfloat16)
    windows = SimpleNamespace(k_buffer=[rows, rows], v_buffer=[rows, rows])
    assert held_bytes(SimpleNamespace(full_kv_pool=SimpleNamespace(kv_buffer=[rows]))) == 3200
    assert held_bytes(SimpleNamespace(full_kv_pool=windows, swa_kv_pool=windows)) == 8 * 3200
