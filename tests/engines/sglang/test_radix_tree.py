"""Trees of nodes that have what SGLang's older radix tree has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang import node_tree
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.sglang.radix_tree import RadixTree
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_freed_slots import Tokens


def node(slots: list[int] | None, *children: Any, locked: int = 0, tokens: int = 0) -> Any:
    """Of a node on the host alone, slots are None, and `tokens` is how many it has."""
    value = None if slots is None else torch.tensor(slots, dtype=torch.int64)
    return SimpleNamespace(
        value=value,
        key=range(len(slots or ()) or tokens),
        lock_ref=locked,
        children=dict(enumerate(children)),
    )


def tree_of(root: Any, held: int = 0) -> RadixTree:
    tree = SimpleNamespace(root_node=root, evictable_size=lambda: held, protected_size=lambda: 1)
    own = torch.device("cpu")
    return RadixTree(tree, {"full": FreedSlots(Tokens(20), 21)}, device=own, scheduler=ForwardStream(own))


def links(tree: RadixTree, *, unlocked_only: bool) -> dict[int, tuple[int, int]]:
    """By slot: position, and slot of the position before."""
    found = tree.cached("full", unlocked_only=unlocked_only)
    columns = found.positions.tolist(), found.previous.tolist()
    return dict(zip(found.slots.tolist(), zip(*columns, strict=True), strict=True))


def test_every_slot_follows_the_last_of_its_parent() -> None:
    leaf = node([9])
    root = node([], node([4, 2], node([7, 5]), node([3], leaf)), node([8]), locked=1)
    assert links(tree_of(root), unlocked_only=False) == {
        4: (0, -1), 2: (1, 4), 7: (2, 2), 5: (3, 7), 3: (2, 2), 9: (3, 3), 8: (0, -1),
    }  # fmt: skip


def test_a_locked_node_is_left_out_and_still_precedes_its_children() -> None:
    root = node([], node([4, 2], node([7, 5]), locked=1), node([8]), locked=1)
    assert links(tree_of(root), unlocked_only=True) == {7: (2, 2), 5: (3, 7), 8: (0, -1)}


def test_nodes_that_are_on_the_host_alone_have_no_slots() -> None:
    """What follows one of them on the device, if anything does, follows nothing that is known."""
    on_host = node(None, node(None, tokens=2), node([9]), tokens=3)
    root = node([], node([4, 2], on_host, node([7], node(None, tokens=1))), node(None, tokens=5))
    expected = {4: (0, -1), 2: (1, 4), 7: (2, 2), 9: (5, -1)}
    assert links(tree_of(root), unlocked_only=False) == links(tree_of(root), unlocked_only=True) == expected


def test_an_empty_tree() -> None:
    tree = tree_of(node([], locked=1), held=3)
    assert links(tree, unlocked_only=False) == links(tree, unlocked_only=True) == {}
    assert tree.count("full") == (4, 0)


def test_a_tree_of_too_many_nodes_is_not_walked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tree, "LONGEST_WALK_SECONDS", -1.0)
    root = node([], *[node([slot]) for slot in range(node_tree._NODES_BETWEEN)])
    with pytest.raises(UnsupportedEngine, match="walking it would hold up the scheduler for more than"):
        tree_of(root).cached("full", unlocked_only=False)
