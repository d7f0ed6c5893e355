"""What is announced when SGLang frees and moves slots of unified memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.freed_slots import FreedSlots, MovingSlots, freed_slots
from canary_obs.engines.sglang.physical_slots import PhysicalSlots
from canary_obs.engines.sglang.unified_memory import UnifiedMemory
from canary_obs.engines.toolkit.method_patches import MethodPatches
from tests.engines.sglang.test_freed_slots import Tokens
from tests.engines.sglang.test_physical_slots import Allocator


class Observer:
    """Notes what it is called with."""

    def __init__(self, broken: bool = False) -> None:
        self.calls, self.faults, self.broken = list[tuple[Any, ...]](), list[str](), broken

    def fault(self, part: str, _: Exception) -> None:
        self.faults.append(part)

    def __getattr__(self, name: str) -> Any:
        if self.broken:
            raise RuntimeError(name)

        def note(group: str, *slots: Any) -> None:
            self.calls.append((name, group, *(each.tolist() for each in slots)))

        return note


class Pool:
    """Notes what is moved, and when."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def move_physical_pages(self, tgt_pages: Any, src_pages: Any, page_size: int) -> None:
        self.observer.calls.append(("moves", tgt_pages.tolist(), src_pages.tolist(), page_size))


@pytest.fixture
def observer() -> Observer:
    return Observer()


def followed(allocator: Allocator, observer: Observer) -> tuple[Pool, MovingSlots, MethodPatches]:
    freed, pool, patches = MovingSlots(allocator, 40), Pool(observer), MethodPatches()
    freed.wrap(patches, SimpleNamespace())
    UnifiedMemory(
        {"full": pool, "swa": None}, {"full": freed, "swa": FreedSlots(Tokens(4), 5)}, observer
    ).wrap(  # type: ignore[arg-type]
        patches
    )
    return pool, freed, patches


def test_whole_pages_are_given_up_before_they_are_free(observer: Observer) -> None:
    allocator = Allocator({3: 5, 4: 1, 6: 2}, page_size=4)
    _, freed, _ = followed(allocator, observer)
    mark = freed.mark()
    allocator.free(torch.tensor([13, 14]))
    slots = [20, 21, 22, 23]
    assert observer.calls == [("before_load", "full", slots), ("invalidated", "full", slots)]
    assert freed.live().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert freed.untouched_since(torch.tensor([20, 4, 23]), mark).tolist() == [False, True, False]
    assert freed.total == 4
    allocator.free(torch.tensor([16]), _pages=torch.tensor([4]))
    assert observer.calls[-1] == ("invalidated", "full", [4, 5, 6, 7])


def test_frees_that_wait_for_others_are_given_up_with_them(observer: Observer) -> None:
    allocator = Allocator({3: 5})
    followed(allocator, observer)
    allocator.free_group = []  # type: ignore[assignment]
    allocator.free(torch.tensor([3]))
    assert observer.calls == []
    allocator.free_group = None
    allocator.free(torch.tensor([3]))
    assert observer.calls[0] == ("before_load", "full", [5])


def test_nothing_is_given_up_of_slots_that_have_none(observer: Observer) -> None:
    allocator = Allocator({3: 5})
    followed(allocator, observer)
    allocator.free(torch.tensor([2]))
    allocator.free(torch.tensor([], dtype=torch.int64))
    assert observer.calls == []


def test_a_move_is_a_copy_whose_source_is_given_up(observer: Observer) -> None:
    pool, freed, _ = followed(Allocator({3: 5}, page_size=4), observer)
    mark = freed.mark()
    pool.move_physical_pages(torch.tensor([2, 3]), torch.tensor([5, 7]), 4)
    left, taken = [20, 21, 22, 23, 28, 29, 30, 31], [8, 9, 10, 11, 12, 13, 14, 15]
    assert observer.calls == [
        ("moves", [2, 3], [5, 7], 4),
        ("copied", "full", left, taken),
        ("invalidated", "full", left),
    ]
    assert freed.untouched_since(torch.tensor([20, 8]), mark).tolist() == [False, True]
    assert freed.total == 8


def test_a_cleared_allocator_gives_up_all(observer: Observer) -> None:
    allocator = Allocator({3: 5, 4: 1})
    _, freed, _ = followed(allocator, observer)
    allocator.clear()
    assert observer.calls == [("before_load", "full", [1, 5]), ("invalidated", "full", [1, 5])]
    assert freed.live().tolist() == []
    allocator.clear()
    assert len(observer.calls) == 2


def test_a_fault_of_ours_does_not_reach_the_engine() -> None:
    broken, allocator = Observer(broken=True), Allocator({3: 5})
    pool, _, _ = followed(allocator, broken)
    allocator.free(torch.tensor([3]))
    assert allocator.virtual_to_physical[3] == -1
    pool.move_physical_pages(torch.tensor([2]), torch.tensor([5]), 1)
    allocator.clear()
    assert broken.faults == ["announce", "announce"]


def test_detached_nothing_is_followed(observer: Observer) -> None:
    allocator = Allocator({3: 5})
    pool, _, patches = followed(allocator, observer)
    patches.restore()
    allocator.free(torch.tensor([3]))
    pool.move_physical_pages(torch.tensor([2]), torch.tensor([5]), 1)
    assert [call[0] for call in observer.calls] == ["moves"]


def test_groups_in_unified_memory_are_followed_each_by_itself() -> None:
    def group(name: str, allocator: Any, own: Any) -> Any:
        return SimpleNamespace(
            view=SimpleNamespace(name=name, num_slots=9), allocator=allocator, own_slots=own
        )

    moving, still = Allocator({}), Tokens(8)
    found = freed_slots([group("full", moving, PhysicalSlots(moving)), group("draft", still, None)])
    assert type(found["full"]) is MovingSlots
    assert type(found["draft"]) is FreedSlots
