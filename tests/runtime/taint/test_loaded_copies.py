"""A random engine with a memory tier: who reads a copy of what was computed from damage, and nobody else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from canary_obs.engine_api.requests import AddedBlocks, ChangedRequests, KeyedBlocks, RequestChange, StoredIn
from tests.runtime.taint.test_tracker import SIZE, Engine

BLOCKS, FAMILIES, LONGEST, KEPT = 19, 4, 6, 12
Key = tuple[int, int]  # of a family's block


@dataclass(slots=True, eq=False)
class Content:
    """What a block holds."""

    key: Key
    bad: bool = False  # computed from damage
    copy: bool = False
    damaged: int = 0  # after this forward; 0 = it is not
    found: bool = False


@dataclass(slots=True, eq=False)
class Request:
    name: str
    family: int
    length: int  # blocks in all
    blocks: list[int] = field(default_factory=list)
    loaded: int = 0  # blocks that were there when it began
    tainted: bool = False


class World:
    """Each forward computes one block of every running request, a first one the whole prompt."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = Engine(hits_compared=False)
        self.engine.elsewhere = StoredIn("a tier", whole=True, shown=True)
        self.held = dict[int, Content]()  # by block
        self.cached = dict[Key, int]()
        self.users = dict.fromkeys(range(BLOCKS), 0)
        self.tier = dict[Key, bool]()  # whether the copy is bad
        self.unsent = list[tuple[Key, int]]()  # stores of the forward before
        self.running, self.waiting, self.all = list[Request](), list[Request](), list[Request]()
        self.given = set[int]()
        self.names = count()
        self.copied = 0  # readings of bad copies

    def free(self) -> int | None:
        """A block for a request; whoever has it in the cache loses it."""
        idle = [block for block, users in self.users.items() if not users]
        if not idle:
            return None
        # What is evicted goes at random, so that copies come back in other blocks.
        block = self.draw.choice(idle)
        if (content := self.held.get(block)) is not None:
            self.check(block, content)
            del self.held[block]
            if self.cached.get(content.key) == block:
                del self.cached[content.key]
        self.users[block] = 1
        self.given.add(block)
        return block

    def show_stored(self, stores: list[tuple[Key, int]]) -> None:
        if stores:
            self.follow(ChangedRequests(stored=keyed(stores)))

    def follow(self, shown: ChangedRequests) -> None:
        self.engine.tracker.follow(shown, self.engine.step)

    def step(self) -> None:
        ended = [one for one in self.running if len(one.blocks) >= one.length or self.draw.random() < 0.05]
        for request in ended:
            self.end(request)
        if ended:
            self.engine.show(ended={one.name: None for one in ended})
        # Not at once: by the block that a reader fills next it is known that the one before was whole.
        for block, content in self.held.items():
            if content.damaged < self.engine.step and self.draw.random() < 0.4:
                self.check(block, content)
        self.given = set[int]()  # blocks, by this step
        begun = self.begin()
        loads = self.admit()
        self.engine.show(*begun, *self.grow())
        # A copy is made before the forward where its block is given to others, else after it.
        self.show_stored([one for one in self.unsent if one[1] in self.given])
        self.engine.forward()
        before, self.unsent = self.unsent, list[tuple[Key, int]]()
        self.compute({key for key, _ in before})
        self.show_stored([one for one in before if one[1] not in self.given])
        if loads:
            self.follow(ChangedRequests(loaded=keyed(loads)))
        self.harm()

    def end(self, request: Request) -> None:
        self.running.remove(request)
        for block in request.blocks:
            self.users[block] -= 1

    def admit(self) -> list[tuple[Key, int]]:
        """New requests join what is cached, and load what the tier has."""
        loads = list[tuple[Key, int]]()
        while len(self.running) + len(self.waiting) < 3 and self.draw.random() < 0.7:
            family = self.draw.randrange(FAMILIES)
            request = Request(f"r{next(self.names)}", family, self.draw.randrange(2, LONGEST + 1))
            for number in range(request.length - 1):
                if (block := self.cached.get((family, number))) is None:
                    break
                self.users[block] += 1
                request.blocks.append(block)
            request.loaded = len(request.blocks)
            self.all.append(request)
            self.waiting.append(request)
            for number in range(request.loaded, request.length - 1):
                key = family, number
                if key not in self.tier or key in dict(self.unsent) or (block := self.free()) is None:
                    break
                self.held[block] = Content(key, self.tier[key], copy=True)
                request.blocks.append(block)
                loads.append((key, block))
        return loads

    def begin(self) -> list[RequestChange]:
        """Requests whose loads are complete: their blocks are cached by then. Some are aborted, some wait."""
        changes = []
        for request in list(self.waiting):
            for number, block in enumerate(request.blocks):
                self.cached.setdefault((request.family, number), block)
            if (chance := self.draw.random()) < 0.3:
                continue
            self.waiting.remove(request)
            computed = len(request.blocks)
            first = self.free() if chance > 0.45 else None
            if first is None:
                for block in request.blocks:
                    self.users[block] -= 1
                self.all.remove(request)
                continue
            request.blocks.append(first)
            self.running.append(request)
            changes.append(
                RequestChange(
                    request=request.name, begins=True, prompt=(computed + 1) * SIZE, computed=computed * SIZE,
                    added={"0": AddedBlocks(np.array(request.blocks), 0, request.loaded)},
                )
            )  # fmt: skip
        return changes

    def grow(self) -> list[RequestChange]:
        changes = []
        for request in self.running:
            if len(request.blocks) >= request.length or request.blocks[-1] not in self.held:
                continue  # it begins
            if (block := self.free()) is None:
                continue
            number = len(request.blocks)
            request.blocks.append(block)
            added = {"0": AddedBlocks(np.array([block]), number, 0)}
            changes.append(
                RequestChange(
                    request=request.name, begins=False, prompt=0, computed=number * SIZE, added=added
                )
            )
        return changes

    def compute(self, copied: set[Key]) -> None:
        """`copied`: keys whose copies are being made."""
        for request in self.running:
            contents = [self.held.get(block) for block in request.blocks]
            read = [one for one in contents if one is not None and (one.bad or one.damaged)]
            request.tainted |= bool(read)
            self.copied += any(one.copy and one.bad for one in read)
            if contents[-1] is None:
                key, block = (request.family, len(contents) - 1), request.blocks[-1]
                self.held[block] = Content(key, request.tainted)
                self.cached.setdefault(key, block)
                if key not in self.tier:
                    self.tier[key] = request.tainted
                    self.unsent.append((key, block))
        idle = [key for key in self.tier if key not in copied and key not in dict(self.unsent)]
        self.draw.shuffle(idle)
        for key in idle[: max(0, len(self.tier) - KEPT)]:
            del self.tier[key]

    def harm(self) -> None:
        """Damage what is stored already; the patrol had just passed it."""
        apart = {block for _, block in self.unsent}
        apart.update(block for one in self.waiting for block in one.blocks[one.loaded :])
        intact = [block for block, one in self.held.items() if block not in apart and not one.damaged]
        if intact and self.draw.random() < 0.04:
            block = self.draw.choice(intact)
            self.held[block].damaged = self.engine.step
            slots = range(block * SIZE, (block + 1) * SIZE)
            self.engine.patrolled |= dict.fromkeys(slots, self.engine.step)

    def check(self, block: int, content: Content) -> None:
        if content.damaged and not content.found:
            content.found = True
            self.engine.find(block, incident=f"{block} in {self.engine.step}")


def keyed(copies: list[tuple[Key, int]]) -> dict[str, KeyedBlocks]:
    """Under keys of their own, as an adapter shows them."""
    keys = [repr(key).encode() for key, _ in copies]
    return {"0": KeyedBlocks(keys, np.array([block for _, block in copies]))}


def served(seed: int, steps: int = 500, kept: int | None = None) -> World:
    """A world after many forwards, all of whose damage is found. `kept`: copies that are followed."""
    world = World(seed)
    if kept is not None:
        world.engine.tracker.readers.stored["0"]._kept = kept
    for _ in range(steps):
        world.step()
    world.engine.show(ended=dict.fromkeys(one.name for one in world.running))
    for block, content in world.held.items():
        world.check(block, content)
    return world


def listed(world: World) -> set[str]:
    names = world.engine.tracker.readers.lives.names
    return {names[life] for damage in world.engine.damages for life in damage.readings}


@pytest.mark.parametrize("seed", [0, 2, 4, 5, 6, 8, 9, 10])
def test_who_reads_bad_copies_is_listed_and_nobody_else(seed: int) -> None:
    world = served(seed)
    assert {damage.cause for damage in world.engine.damages} == {None}
    assert world.copied > 0
    assert listed(world) == {one.name for one in world.all if one.tainted}


@pytest.mark.parametrize("seed", [2, 4, 6, 8])
def test_copies_that_are_forgotten_make_it_unknown_who_is_missing(seed: int) -> None:
    world = served(seed, kept=4)
    missing = {one.name for one in world.all if one.tainted} - listed(world)
    assert missing
    assert any(damage.cause for damage in world.engine.damages)
