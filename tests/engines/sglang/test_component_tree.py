"""Trees whose nodes have slots of full layers and of windows, as SGLang 0.5.16's have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.component_tree import ComponentTree
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.sglang.window_slots import WindowSlots
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from tests.engines.sglang.test_freed_slots import Tokens

CPU = torch.device("cpu")
LOCKED = 7  # a state that a running request holds on to


def node(
    slots: list[int],
    *children: Any,
    windows: bool = True,
    locked: tuple[int, int] = (0, 0),
    state: int | None = None,
) -> Any:
    """Slots of windows are ten more; `locked`: by running requests, full ones and those of windows."""
    full = torch.tensor(slots, dtype=torch.int64)
    data = [
        SimpleNamespace(value=value, lock_ref=count)
        for value, count in zip((full, full + 10 if windows else None), locked, strict=True)
    ]
    held = None if state is None else torch.tensor([state])
    data.append(SimpleNamespace(value=held, lock_ref=int(state == LOCKED)))
    return SimpleNamespace(key=slots, component_data=data, children=dict(enumerate(children)))


def tree_of(root: Any, windows: WindowSlots | None = None) -> ComponentTree:
    sizes = {"full_evictable_size": 5, "full_protected_size": 2, "swa_evictable_size": 3}
    sizes |= {"swa_protected_size": 1, "mamba_evictable_size": 2, "mamba_protected_size": 1}
    tree = SimpleNamespace(root_node=root, **{name: lambda size=size: size for name, size in sizes.items()})
    freed = {name: FreedSlots(Tokens(20), 21) for name in ("full", "swa", "state")}
    own = {} if windows is None else {"swa": windows}
    return ComponentTree(tree, freed, own, device=CPU, scheduler=ForwardStream(CPU))


def links(tree: ComponentTree, group: str, *, unlocked_only: bool = False) -> dict[int, tuple[int, int]]:
    """By slot: position, and slot of the position before."""
    found = tree.cached(group, unlocked_only=unlocked_only)
    walk = tree.walk(group)
    if not unlocked_only:  # piece by piece the same
        parts = []
        while (part := walk.take(2)).slots.numel():
            parts.append(part)
        for name in ("slots", "positions", "previous"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(found, name))
    columns = found.positions.tolist(), found.previous.tolist()
    return dict(zip(found.slots.tolist(), zip(*columns, strict=True), strict=True))


def a_tree() -> ComponentTree:
    """4 2 [7 5 | 3 [9]] and 8 [6 [1]]; of windows, 4 2, 3 and 6 have left theirs."""
    leaf = node([9], locked=(1, 0))
    other = node([8], node([6], node([1], locked=(1, 1)), windows=False, locked=(1, 0)))
    gone = node([3], leaf, windows=False, locked=(1, 0))
    return tree_of(node([], node([4, 2], node([7, 5], locked=(1, 1)), gone, windows=False), other))


def test_every_full_slot_follows_the_last_of_its_parent() -> None:
    assert links(a_tree(), "full") == {
        4: (0, -1), 2: (1, 4), 7: (2, 2), 5: (3, 7), 3: (2, 2), 9: (3, 3), 8: (0, -1), 6: (1, 8), 1: (2, 6),
    }  # fmt: skip


def test_slots_of_windows_follow_none_that_has_left_its_window() -> None:
    """And have the positions of their tokens all the same."""
    assert links(a_tree(), "swa") == {17: (2, -1), 15: (3, 17), 19: (3, -1), 18: (0, -1), 11: (2, -1)}


def test_each_group_has_locks_of_its_own() -> None:
    tree = a_tree()
    assert set(links(tree, "full", unlocked_only=True)) == {4, 2, 8}
    assert set(links(tree, "swa", unlocked_only=True)) == {19, 18}


def test_states_follow_none_and_not_every_node_has_one() -> None:
    below = node([7, 5], node([6], state=3), node([1], state=LOCKED))
    tree = tree_of(node([], node([4, 2], below, state=12), node([8])))
    alone = (0, -1)
    assert links(tree, "state") == {12: alone, 3: alone, LOCKED: alone}
    assert set(links(tree, "state", unlocked_only=True)) == {12, 3}
    assert links(tree, "full")[6] == (4, 5)
    assert tree.count("state").slots == 3
    assert tree.swa_resident("state", torch.tensor([3])) is None


def test_counts_are_the_trees_own() -> None:
    tree = a_tree()
    assert (tree.count("full").slots, tree.count("swa").slots) == (7, 4)


@pytest.mark.parametrize("group", ["full", "swa"])
def test_slots_that_a_window_still_holds(group: str) -> None:
    mapping = torch.tensor([0, 0, 0, 12, 0, -1])
    tree = tree_of(node([]), WindowSlots(mapping))
    found = tree.swa_resident(group, torch.tensor([3, 4, 0]))
    assert found is not None
    assert found.tolist() == [True, group == "swa", False]
    none = tree.swa_resident(group, torch.empty(0, dtype=torch.int64))
    assert none is not None
    assert not none.numel()
    assert tree_of(node([])).swa_resident(group, torch.tensor([3])) is None
