"""Frees of an allocator that has what SGLang's two have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.runtime.device.pinned_space import PinnedSpace
from tests.runtime.device.test_upload_ring import ManualEvent


class Tokens:
    """As TokenToKVPoolAllocator: slot 0 is not given away."""

    page_size = 1

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size + 1)

    def free(self, free_index: Any) -> None:
        self.free_pages = torch.cat([self.free_pages, free_index])

    def get_all_free_pages(self) -> Any:
        return self.free_pages

    def alloc(self, count: int) -> Any:
        given, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return given


class Pages(Tokens):
    """As PagedTokenToKVPoolAllocator: all of its frees end in `_release_page_ids`."""

    page_size = 4

    def free(self, free_index: Any) -> None:
        self._release_page_ids(torch.unique(free_index // 4))

    def _release_page_ids(self, *page_ids: Any) -> None:
        self.free_pages = torch.cat([*page_ids, self.free_pages])


class PagesOfOld:
    """As PagedTokenToKVPoolAllocator of 0.5.16: pages are freed by their slots."""

    page_size = 4

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size + 1)
        self.release_pages, self.free_group = torch.zeros(0, dtype=torch.int64), list[Any]()

    def free(self, free_index: Any) -> None:
        self.free_pages = torch.cat([torch.unique(free_index // 4), self.free_pages])

    def alloc(self, count: int) -> Any:
        given, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return given


class States:
    """As MambaSlotAllocator, which has neither pages nor a name for what is free that the others have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.free_slots = torch.arange(1, self.size + 1)

    def free(self, free_index: Any) -> None:
        self.free_slots = torch.cat([self.free_slots, free_index])

    def alloc(self, count: int) -> Any:
        given, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return given


def test_states_that_are_in_use() -> None:
    allocator, patches = States(4), MethodPatches()
    freed = FreedSlots(allocator, 5)
    freed.wrap(patches, SimpleNamespace())
    assert allocator.alloc(3).tolist() == freed.live().tolist() == [1, 2, 3]
    mark = freed.mark()
    allocator.free(torch.tensor([2]))
    assert freed.live().tolist() == [1, 3]
    assert freed.untouched_since(torch.tensor([1, 2, 3]), mark).tolist() == [True, False, True]
    allocator.clear()
    assert freed.live().tolist() == []
    assert not freed.untouched_since(torch.tensor([1]), mark).any()


@pytest.mark.parametrize("kind", [Tokens, Pages, PagesOfOld])
def test_what_is_taken_back_is_no_longer_what_it_was(kind: Any) -> None:
    allocator, patches, size = kind(8), MethodPatches(), kind.page_size
    freed = FreedSlots(allocator, 9 * size)
    freed.wrap(patches, SimpleNamespace())
    given = allocator.alloc(3)
    slots = (given[:, None] * size + torch.arange(size)).reshape(-1)
    assert freed.live().tolist() == slots.tolist()
    mark = freed.mark()
    assert freed.untouched_since(slots, mark).all()
    allocator.free(slots[:size])
    again = allocator.alloc(8)  # by another request, which has the same slots
    assert again.numel() == 6
    assert freed.untouched_since(slots, mark).tolist() == [False] * size + [True] * 2 * size
    assert freed.untouched_since(slots, freed.mark()).all()
    assert freed.total == size


@pytest.mark.parametrize("kind", [Tokens, Pages, PagesOfOld])
def test_what_a_tree_evicts_by_a_method_it_took_before_is_followed(kind: Any) -> None:
    """As the UnifiedRadixCache of 0.5.16, whose evictions no attribute of the allocator sees."""
    allocator, other, patches, size = kind(8), kind(8), MethodPatches(), kind.page_size
    component = SimpleNamespace(_free_full=allocator.free, _free_windows=other.free)
    before = dict(vars(component))
    freed = FreedSlots(allocator, 9 * size)
    freed.wrap(patches, SimpleNamespace(_components_tuple=(component,)))
    slots = (allocator.alloc(2)[:, None] * size + torch.arange(size)).reshape(-1)
    mark = freed.mark()
    component._free_windows(slots)
    assert freed.untouched_since(slots, mark).all()
    component._free_full(slots[:size])
    assert freed.untouched_since(slots, mark).tolist() == [False] * size + [True] * size
    assert freed.total == size
    assert allocator.free_pages.numel() == 7
    patches.restore()
    assert vars(component) == before


@pytest.mark.parametrize("kind", [Tokens, Pages, PagesOfOld])
def test_a_flush_takes_everything_back(kind: Any) -> None:
    allocator, patches = kind(8), MethodPatches()
    freed = FreedSlots(allocator, 9 * kind.page_size)
    freed.wrap(patches, SimpleNamespace())
    allocator.alloc(3)
    mark = freed.mark()
    allocator.clear()
    assert not freed.untouched_since(torch.arange(9 * kind.page_size), mark).any()
    assert freed.live().numel() == 0
    assert freed.total >= 8 * kind.page_size
    patches.restore()
    assert not {"free", "clear", "_release_page_ids"} & vars(allocator).keys()


def test_what_was_live_before_is_not_taken_for_what_stayed() -> None:
    """Frees before the adapter was attached were not seen."""
    allocator = Tokens(8)
    freed = FreedSlots(allocator, 9)
    mark = freed.mark()
    freed.wrap(MethodPatches(), SimpleNamespace())
    assert not freed.untouched_since(torch.arange(9), mark).any()


def test_an_engine_that_frees_what_it_never_had_is_not_stopped_by_the_canary() -> None:
    """Nothing counts as untouched then."""
    allocator = Tokens(8)
    freed = FreedSlots(allocator, 9)
    freed.wrap(MethodPatches(), SimpleNamespace())
    mark = freed.mark()
    allocator.free(torch.tensor([99]))
    assert allocator.free_pages[-1] == 99
    assert not freed.untouched_since(torch.arange(9), mark).any()


def test_slots_that_come_from_a_device_are_noted_when_they_are_there() -> None:
    """Whether there was room in the memory that is allocated at attach, or not."""
    freed, slots = FreedSlots(Tokens(20), 21), torch.arange(21)
    freed._space = PinnedSpace(32, pinned=False)
    mark, gates = freed.mark(), [ManualEvent() for _ in range(4)]
    for gate, numbers in zip(gates, ([3, 4], [7, 8, 9], [11], [12]), strict=True):
        freed._send(torch.tensor(numbers), gate)  # type: ignore[arg-type]
    assert [coming.kept for coming in freed._coming] == [True, False, True, False]
    assert not freed.noted()
    for gate, count in zip(gates, (2, 5, 6, 7), strict=True):
        gate.passed = True
        freed.noted()
        assert int((torch.from_numpy(freed._freed) > mark).sum()) == count
    assert freed.noted()
    assert [slot for slot in slots.tolist() if freed._freed[slot] > mark] == [3, 4, 7, 8, 9, 11, 12]
    for _ in range(3):  # all of it has been given back
        freed._send(torch.tensor([1, 2, 3, 4]), gates[0])  # type: ignore[arg-type]
        assert freed._coming[-1].kept
        gates[0].passed = True
        assert freed.noted()
