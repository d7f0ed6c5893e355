"""The radix tree's own walk as sweeps see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang import prefix_tree
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.sglang.prefix_tree import PrefixTree
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_freed_slots import Tokens


class Tree:
    """A tree of one branch, whose counters are apart from its content."""

    def __init__(self, slots: list[int], locked: int = 0) -> None:
        self.slots, self.locked, self.walks = slots, locked, 0
        self.tree_core = self

    def full_evictable_size(self) -> int:
        return len(self.slots) - self.locked

    def full_protected_size(self) -> int:
        return self.locked

    def walk_for_kv_canary(self, *, unlocked_only: bool, swa_resident_only: bool) -> Any:
        assert not swa_resident_only
        self.walks += 1
        first = self.locked if unlocked_only else 0
        return SimpleNamespace(
            slot_indices=torch.tensor(self.slots[first:]),
            positions=torch.arange(first, len(self.slots)),
            prev_slot_indices=torch.tensor([-1, *self.slots][first : len(self.slots)]),
        )


def test_slots_with_their_positions_and_what_precedes_them() -> None:
    allocator = Tokens(9)
    freed = FreedSlots(allocator, 10)
    freed.wrap(MethodPatches())
    tree = PrefixTree(Tree([4, 2, 7], locked=1), freed)
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
    freed = FreedSlots(Tokens(2), 3)
    PrefixTree(Tree([1] * most), freed).cached("full", unlocked_only=False)
    large = Tree([1] * (most + 1))
    with pytest.raises(UnsupportedEngine, match=f"holds {most + 1} tokens, and walking it would hold up"):
        PrefixTree(large, freed).cached("full", unlocked_only=False)
    assert large.walks == 0


def test_what_a_walk_takes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 us for each slot: 20 000 may be walked in 20 ms, one more may not."""
    seconds = iter([0.0, 0.01, 5.0, 5.02])
    monkeypatch.setattr(prefix_tree.time, "perf_counter", lambda: next(seconds))
    held = Tree([1] * 10_000)
    tree = PrefixTree(held, FreedSlots(Tokens(2), 3))
    tree.cached("full", unlocked_only=False)
    held.slots = [1] * 20_001
    with pytest.raises(UnsupportedEngine, match="for about 20 ms"):
        tree.cached("full", unlocked_only=False)
    held.slots = [1] * 20_000
    tree.cached("full", unlocked_only=False)
