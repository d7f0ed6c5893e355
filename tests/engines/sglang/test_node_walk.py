"""Walks over a tree's nodes in pieces: the same as all at once, without waiting, and in bounded time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk
from canary_obs.engines.sglang import node_tree, node_walk
from canary_obs.engines.sglang.freed_slots import FreedSlots, _Coming
from canary_obs.engines.sglang.node_walk import NodeWalk, SlotCopies
from canary_obs.engines.sglang.radix_tree import RadixTree
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.method_patches import MethodPatches
from tests.engines.sglang.test_freed_slots import Tokens

CPU = torch.device("cpu")


class Arrival:
    """An event that happens when a test says so; waiting for it is written down."""

    def __init__(self) -> None:
        self.happened, self.waits = False, 0

    def record(self) -> None:
        """The copy is on its way."""

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waits += 1


def random_nodes(draw: random.Random, count: int, longest: int) -> tuple[list[torch.Tensor], list[int]]:
    """Nodes of different slots, each after its parent."""
    lengths = [draw.randrange(longest + 1) for _ in range(count)]
    slots = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(draw.randrange(99))) + 1
    return list(slots.split(lengths)), [draw.randrange(-1, number) for number in range(count)]


def links(shown: list[CachedSlots]) -> list[tuple[int, int, int]]:
    return [
        link
        for part in shown
        for link in zip(part.slots.tolist(), part.positions.tolist(), part.previous.tolist(), strict=True)
    ]


def followed(values: list[torch.Tensor], parents: list[int]) -> list[tuple[int, int, int]]:
    """The same, worked out slot by slot."""
    tokens: list[list[int]] = []  # of each node, with those before it
    found = []
    for value, parent in zip(values, parents, strict=True):
        before = list(tokens[parent]) if parent >= 0 else []
        for slot in value.tolist():
            found.append((slot, len(before), before[-1] if before else -1))
            before.append(slot)
        tokens.append(before)
    return found


def walk_of(values: list[torch.Tensor], parents: list[int]) -> NodeWalk:
    freed = FreedSlots(Tokens(20), 21)
    return NodeWalk(values, parents, SlotCopies(CPU, ForwardStream(CPU)), freed)


def taken(walk: CachedWalk, limit: Callable[[], int]) -> list[CachedSlots]:
    parts = []
    while (part := walk.take(limit())).slots.numel():
        parts.append(part)
    return parts


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_what_there_is_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes longer than a piece, pieces of many nodes, and nodes without slots."""
    draw = random.Random(seed)
    monkeypatch.setattr(node_walk, "PIECE_SLOTS", draw.randrange(1, 40))
    monkeypatch.setattr(node_walk, "_PIECE_NODES", draw.randrange(1, 9))
    values, parents = random_nodes(draw, draw.randrange(30), draw.choice([1, 5, 90]))
    walk = walk_of(values, parents)
    assert walk.total == sum(map(len, values))
    expected = followed(values, parents)
    assert links(taken(walk, lambda: draw.randrange(1, 60))) == expected
    assert links([walk_of(values, parents).at_once()]) == expected


def test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted() -> None:
    walk = walk_of([torch.arange(1, 9)], [-1])
    arrival = Arrival()
    walk._copies._rows[0] = walk._copies._rows[0]._replace(arrived=arrival)  # type: ignore[arg-type]
    assert not walk.ready
    arrival.happened = True
    assert walk.ready
    freed = Arrival()
    walk._freed._coming.append(_Coming(1, torch.tensor([20]), freed))  # type: ignore[arg-type]
    assert [walk.ready for _ in range(node_walk._MOST_WAITS + 1)] == [False] * node_walk._MOST_WAITS + [True]
    walk._freed._coming.clear()
    assert walk.ready
    assert walk.take(3).slots.tolist() == [1, 2, 3]
    assert walk.ready
    assert walk.take(99).slots.tolist() == [4, 5, 6, 7, 8]
    assert walk.ready
    assert not walk.take(99).slots.numel()
    assert freed.waits == 0


def test_what_the_tree_does_to_nodes_after_its_listing_does_not_matter() -> None:
    """It splits them, and gives their slots to others."""
    value = torch.arange(1, 9)
    child = SimpleNamespace(value=value, lock_ref=0, children={})
    root = SimpleNamespace(value=[], lock_ref=1, children={0: child})
    cache = SimpleNamespace(root_node=root, evictable_size=lambda: 8, protected_size=lambda: 0)
    allocator = Tokens(20)
    freed = FreedSlots(allocator, 21)
    freed.wrap(MethodPatches(), SimpleNamespace())
    tree = RadixTree(cache, {"full": freed}, device=CPU, scheduler=ForwardStream(CPU))
    allocator.free(torch.tensor([4]))  # cached anew since, by the same tree
    walk = tree.walk("full")
    root.children = {0: SimpleNamespace(value=value[:3].clone(), lock_ref=0, children={0: child})}
    child.value = value[3:].clone()
    allocator.free(torch.tensor([8, 2]))
    found = walk.take(99)
    assert found.slots.tolist() == list(range(1, 9))
    assert tree.still_cached("full", found.slots).tolist() == [True, False, *[True] * 5, False]


def cpu_ms(act: Callable[[], Any]) -> tuple[float, Any]:
    """Of this thread: others on the machine do not count."""
    started = time.thread_time()
    found = act()
    return 1e3 * (time.thread_time() - started), found


def plain_walk(root: Any) -> list[Any]:
    """The nodes below a root, as plainly as can be: how fast this machine is just now."""
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        found.append((node, len(node.value), node.lock_ref))
        waiting.extend(node.children.values())
    return found


@pytest.mark.parametrize(
    ("nodes", "start_ms", "plain_ms"), [(500, 2.0, 1.2), (9000, 15.0, 12.5)], ids=["long", "short"]
)
def test_a_step_that_sweeps_270_000_tokens_is_not_held_up(
    nodes: int, start_ms: float, plain_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of five: the start, which lists the nodes, and the longest of all pieces.

    `plain_ms`: what `plain_walk` takes where these limits are meant for; a slower machine has longer ones.
    """
    monkeypatch.setattr(node_tree, "LONGEST_WALK_SECONDS", 10.0)  # of a machine that does other work
    per_node = 270_000 // nodes
    tails = [
        SimpleNamespace(value=torch.arange(n * per_node, (n + 1) * per_node), lock_ref=0, children={})
        for n in range(nodes)
    ]
    for number, tail in enumerate(tails[1:], 1):
        tails[number // 4].children[number] = tail
    root = SimpleNamespace(value=[], lock_ref=1, children={0: tails[0]})
    cache = SimpleNamespace(root_node=root, evictable_size=lambda: 270_000, protected_size=lambda: 0)
    freed = {"full": FreedSlots(Tokens(2), 270_001)}
    tree = RadixTree(cache, freed, device=CPU, scheduler=ForwardStream(CPU))
    starts, longest, plain = [], [], []
    for _ in range(5):
        plain.append(cpu_ms(lambda: plain_walk(root))[0])
        spent, walk = cpu_ms(lambda: tree.walk("full"))
        starts.append(spent)
        pieces, shown = [], 0
        while True:
            spent, part = cpu_ms(lambda walk=walk: walk.ready and walk.take(4096))
            if not part.slots.numel():
                break
            pieces.append(spent)
            shown += part.slots.numel()
        assert shown == per_node * nodes
        longest.append(max(pieces))
    slower = max(1.0, min(plain) / plain_ms)
    assert min(starts) < start_ms * slower
    assert min(longest) < 1.0 * slower
