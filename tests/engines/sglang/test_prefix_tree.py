"""The radix tree's own walk as sweeps see it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang import prefix_tree
from canary_obs.engines.sglang.freed_slots import FreedSlots, MovingSlots
from canary_obs.engines.sglang.physical_slots import PhysicalSlots
from canary_obs.engines.sglang.prefix_tree import PrefixTree
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_freed_slots import States, Tokens
from tests.engines.sglang.test_physical_slots import Allocator


class Tree:
    """A tree of one branch, whose counters are apart from its content."""

    def __init__(self, slots: list[int], locked: int = 0, windows: int = 0) -> None:
        """The last `windows` of the slots have one in the window group."""
        self.slots, self.locked, self.windows, self.walks = slots, locked, windows, 0
        self.tree_core = self

    def full_evictable_size(self) -> int:
        return len(self.slots) - self.locked

    def full_protected_size(self) -> int:
        return self.locked

    def swa_evictable_size(self) -> int:
        return self.windows - self.swa_protected_size()

    def swa_protected_size(self) -> int:
        return min(self.windows, 1)

    def walk_for_kv_canary(self, *, unlocked_only: bool, swa_resident_only: bool) -> Any:
        self.walks += 1
        first = self.locked if unlocked_only else 0
        first = max(first, len(self.slots) - self.windows) if swa_resident_only else first
        return SimpleNamespace(
            slot_indices=torch.tensor(self.slots[first:]),
            positions=torch.arange(first, len(self.slots)),
            prev_slot_indices=torch.tensor([-1, *self.slots][first : len(self.slots)]),
        )


def test_states_of_the_tree_follow_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a running request holds on to: it writes to a copy."""
    allocator, found = States(6), Tree([4, 2, 7])
    freed = FreedSlots(allocator, 7)
    freed.wrap(MethodPatches(), SimpleNamespace())
    tree = PrefixTree(found, {"full": FreedSlots(Tokens(9), 10), "state": freed})
    for name, value in (("mamba_evictable_size", 2), ("mamba_protected_size", 1)):
        monkeypatch.setattr(found, name, lambda value=value: value, raising=False)
    slots = torch.tensor([5, 1, 3], dtype=torch.int32)
    monkeypatch.setattr(found, "all_mamba_values_flatten", lambda: slots, raising=False)
    cached = tree.cached("state", unlocked_only=True)
    assert (cached.slots.tolist(), cached.positions.tolist(), cached.previous.tolist()) == (
        [5, 1, 3], [0, 0, 0], [-1, -1, -1],
    )  # fmt: skip
    assert tree.count("state") == (3, 0)
    assert found.walks == 0
    allocator.free(torch.tensor([1]))
    assert tree.still_cached("state", cached.slots).tolist() == [True, False, True]
    assert tree.count("state") == (3, 1)


def test_slots_with_their_positions_and_what_precedes_them() -> None:
    allocator = Tokens(9)
    freed = FreedSlots(allocator, 10)
    freed.wrap(MethodPatches(), SimpleNamespace())
    tree = PrefixTree(Tree([4, 2, 7], locked=1), {"full": freed})
    found = tree.cached("full", unlocked_only=False)
    assert (found.slots.tolist(), found.positions.tolist(), found.previous.tolist()) == (
        [4, 2, 7], [0, 1, 2], [-1, 4, 2],
    )  # fmt: skip
    assert tree.count("full") == (3, 0)
    assert tree.cached("full", unlocked_only=True).slots.tolist() == [2, 7]
    allocator.free(torch.tensor([2, 9]))
    assert tree.still_cached("full", torch.tensor([4, 2, 7])).tolist() == [True, False, True]
    assert tree.count("full") == (3, 2)
    tree.cached("full", unlocked_only=False)
    assert tree.still_cached("full", torch.tensor([4, 2, 7])).all()


def test_a_walk_that_would_take_too_long_is_refused_before_it_begins() -> None:
    most = prefix_tree._FIRST_SLOTS
    freed = {"full": FreedSlots(Tokens(2), 3)}
    PrefixTree(Tree([1] * most), freed).cached("full", unlocked_only=False)
    large = Tree([1] * (most + 1))
    with pytest.raises(UnsupportedEngine, match=f"holds {most + 1} tokens, and walking it would hold up"):
        PrefixTree(large, freed).cached("full", unlocked_only=False)
    assert large.walks == 0


def test_what_a_walk_takes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 us for each slot: 20 000 may be walked in 20 ms, one more may not."""
    seconds = iter([0.0, 0.01, 2.0, 2.01, 5.0, 5.02])
    monkeypatch.setattr(prefix_tree.time, "thread_time", lambda: next(seconds))
    held = Tree([1] * 10_000)
    tree = PrefixTree(held, {"full": FreedSlots(Tokens(2), 3)})
    tree.cached("full", unlocked_only=False)
    tree.cached("full", unlocked_only=False)
    held.slots = [1] * 20_001
    with pytest.raises(UnsupportedEngine, match="for about 20 ms"):
        tree.cached("full", unlocked_only=False)
    held.slots = [1] * 20_000
    tree.cached("full", unlocked_only=False)


def test_one_walk_that_took_long_does_not_end_all_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that did something else for once; two such walks in a row are the tree's own time."""
    seconds = iter([0.0, 0.001, 1.0, 1.1, 2.0, 2.001, 3.0, 3.1, 4.0, 4.1])
    monkeypatch.setattr(prefix_tree.time, "thread_time", lambda: next(seconds))
    tree = PrefixTree(Tree([1] * 1000), {"full": FreedSlots(Tokens(2), 3)})
    for _ in range(5):
        tree.cached("full", unlocked_only=False)
    with pytest.raises(UnsupportedEngine, match="for about 100 ms"):
        tree.cached("full", unlocked_only=False)


def test_a_walk_that_waited_for_a_core_did_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes had the cores for 30 ms in each of three walks."""
    now = itertools.count(step=0.03)
    monkeypatch.setattr(prefix_tree.time, "perf_counter", lambda: next(now))
    tree = PrefixTree(Tree([1] * 1000), {"full": FreedSlots(Tokens(2), 3)})
    for _ in range(3):
        assert tree.cached("full", unlocked_only=False).slots.numel() == 1000


def test_a_window_group_has_slots_of_its_own() -> None:
    """Of four cached tokens the last two kept theirs: 3 and 1, for the full slots 7 and 5."""
    allocators = {"full": Tokens(9), "swa": Tokens(4)}
    freed = {group: FreedSlots(each, each.size + 1) for group, each in allocators.items()}
    for each in freed.values():
        each.wrap(MethodPatches(), SimpleNamespace())
    own = torch.tensor([0, 0, 0, 0, 0, 1, 0, 3, 0, 0, -1])
    tree = PrefixTree(Tree([4, 2, 7, 5], windows=2), freed, {"swa": own})
    found = tree.cached("swa", unlocked_only=False)
    assert (found.slots.tolist(), found.positions.tolist(), found.previous.tolist()) == (
        [3, 1],
        [2, 3],
        [-1, 3],
    )
    assert tree.count("swa") == (2, 0)
    assert tree.cached("full", unlocked_only=False).slots.tolist() == [4, 2, 7, 5]
    resident = tree.swa_resident("full", torch.tensor([4, 2, 7, 5]))
    assert resident is not None
    assert resident.tolist() == [False, False, True, True]
    allocators["swa"].free(torch.tensor([3]))
    assert tree.still_cached("swa", torch.tensor([3, 1])).tolist() == [False, True]
    assert tree.still_cached("full", torch.tensor([7, 5])).all()
    assert tree.count("swa").removed == 1


def test_a_draft_models_windows_are_cached_as_the_targets() -> None:
    own = torch.tensor([0, 0, 0, 0, 0, 1, 0, 3, 0, 0, -1])
    freed = {group: FreedSlots(Tokens(9), 10) for group in ("full", "draft_0")}
    tree = PrefixTree(Tree([4, 2, 7, 5], windows=2), freed, {"draft_0": own}, windowed=["draft_0"])
    found = tree.cached("draft_0", unlocked_only=False)
    assert (found.slots.tolist(), found.previous.tolist()) == ([3, 1], [-1, 3])
    assert tree.count("draft_0") == (2, 0)


def test_without_windows_nobody_says_what_is_in_them() -> None:
    tree = PrefixTree(Tree([4]), {"full": FreedSlots(Tokens(9), 10)})
    assert tree.swa_resident("full", torch.tensor([4])) is None


def test_slots_of_unified_memory() -> None:
    """The tree has virtual slots: sweeps are given those where the bytes are."""
    full, windows, states = Allocator({3: 5, 4: 1, 6: 2}), Allocator({4: 7}), Allocator({2: 6})
    allocators = {"full": full, "swa": windows, "state": states}
    freed = {name: MovingSlots(each, 9) for name, each in allocators.items()}
    own = {name: PhysicalSlots(each) for name, each in allocators.items()}
    held = Tree([3, 4, 6], windows=2)
    tree = PrefixTree(held, freed, own)
    found = tree.cached("full", unlocked_only=False)
    assert (found.slots.tolist(), found.previous.tolist()) == ([5, 1, 2], [-1, 5, 1])
    resident = tree.swa_resident("full", torch.tensor([5, 1, 2]))
    assert resident is not None
    assert resident.tolist() == [False, True, False]
    freed["full"].left(torch.tensor([1]))
    assert tree.still_cached("full", found.slots).tolist() == [True, False, True]
    assert tree.count("full").removed == 1
    held.slots = [4]
    windowed = tree.cached("swa", unlocked_only=False)
    assert (windowed.slots.tolist(), windowed.previous.tolist()) == ([7], [-1])
    vars(held)["all_mamba_values_flatten"] = lambda: torch.tensor([2])
    assert tree.cached("state", unlocked_only=False).slots.tolist() == [6]
