"""Requests that speculate, on few blocks with faults in them: every reader of damage is listed, however late
findings are read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from canary_obs.engine_api.requests import AddedBlocks, BlockTable, ChangedRequests, RequestChange
from canary_obs.runtime.taint.good_checks import GoodChecks
from canary_obs.runtime.taint.tracker import TaintTracker
from canary_obs.vocabulary import Phase
from tests.runtime.taint.test_tracker import SIZE, finding
from tests.sizes import sized

BLOCKS, STEPS, RUNNING, DRAFTED, RUNS = 32, 120, 3, 3, sized(40, 15)
Row = tuple[int, int, Phase, int]  # slot, forward, phase, fault


@dataclass
class Request:
    name: str
    prompt: int
    tokens: int  # it is to emit
    emitted: int = 0
    resumed: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafted: int = 0
    begun: bool = False

    def slots(self, first: int, last: int) -> list[int]:
        return [self.blocks[at // SIZE] * SIZE + at % SIZE for at in range(first, last)]


class Engine:
    """Blocks are given out again last in, first out, as vLLM does with those that are not cached."""

    def __init__(self, seed: int, *, on_host: bool, late: int) -> None:
        self.draw, self.late, self.step = random.Random(seed), late, 0
        self.written: dict[int, int] = {}
        good = GoodChecks(
            lambda _, slot: self.written.get(slot) if on_host else None,
            lambda *_: None,
            hits_compared=True,
        )
        table = BlockTable("0", SIZE, SIZE)
        self.tracker = TaintTracker({"full": table}, {"0": BLOCKS + 1}, good, lambda: None, lambda: None)
        self.free, self.running, self.waiting = list(range(1, BLOCKS + 1)), list[Request](), list[Request]()
        self.faults: dict[int, int] = {}  # by slot
        self.readers, self.known, self.made, self.planted = set[str](), set[int](), 0, 0
        self.unread: list[tuple[int, list[Row]]] = []

    def run(self) -> set[str]:
        """The readers that are not listed."""
        for _ in range(STEPS):
            ended = self.end_some()
            self.begin_one(ended)
            changed = [change for one in self.running if (change := self.schedule(one)) is not None]
            shown = ChangedRequests(ended=ended, changed=changed, rewrites=True)
            self.tracker.follow(shown, self.step)
            self.step += 1
            rows = self.forward()
            due = max([self.step + self.draw.randint(0, self.late), *(at for at, _ in self.unread)])
            self.unread.append((due, rows))
            while self.unread and self.unread[0][0] <= self.step:
                self.read(self.unread.pop(0)[1])
            if self.draw.random() < 0.35 and (intact := sorted(self.written.keys() - self.faults)):
                self.planted += 1
                self.faults[self.draw.choice(intact)] = self.planted
        for _, rows in self.unread:
            self.read(rows)
        self.read([(slot, self.step, Phase.SWEEP, fault) for slot, fault in self.faults.items()])
        names = self.tracker.readers.lives.names
        damages = self.tracker.damages.values()
        return self.readers - {names[life] for damage in damages for life in damage.readings}

    def end_some(self) -> dict[str, int | None]:
        ended: dict[str, int | None] = {}
        for one in list(self.running):
            done = one.emitted >= one.tokens
            if done or self.draw.random() < 0.04:
                self.running.remove(one)
                self.free[:0] = one.blocks[::-1]
                ended[one.name] = one.emitted
                if not done:
                    self.waiting.append(Request(one.name, one.prompt, one.tokens, one.emitted, resumed=True))
        return ended

    def begin_one(self, ended: dict[str, int | None]) -> None:
        if len(self.running) == RUNNING:
            return
        if self.waiting and self.draw.random() < 0.7 and self.waiting[0].name not in ended:
            self.running.append(self.waiting.pop(0))
        else:
            self.made += 1
            one = Request(f"r{self.made}", self.draw.randint(1, 7), self.draw.randint(1, 12))
            self.running.append(one)

    def schedule(self, one: Request) -> RequestChange | None:
        begins, one.begun = not one.begun, True
        one.drafted = 0 if begins else self.draw.randint(0, DRAFTED)
        count = max(0, -(-(one.prompt + one.emitted + one.drafted) // SIZE) - len(one.blocks))
        new, self.free = self.free[:count], self.free[count:]
        first = len(one.blocks)
        one.blocks += new
        if not new:
            return None
        return RequestChange(
            request=one.name, begins=begins, prompt=one.prompt, computed=one.computed,
            added={"0": AddedBlocks(np.array(new), first, 0)},
            emitted=one.emitted if begins and one.resumed else None,
        )  # fmt: skip

    def forward(self) -> list[Row]:
        rows: list[Row] = []
        for one in self.running:
            if any(slot in self.faults for slot in one.slots(0, one.computed)):
                self.readers.add(one.name)
            for slot in one.slots(one.computed, one.prompt + one.emitted + one.drafted):
                if (fault := self.faults.pop(slot, None)) is not None:
                    rows.append((slot, self.step, Phase.HEAD, fault))
                self.written[slot] = self.step
            accepted = self.draw.randint(0, one.drafted)
            one.computed = one.prompt + one.emitted + accepted
            one.emitted += 1 + accepted
        met = self.faults.items() if self.draw.random() < 0.3 else ()
        return rows + [(slot, self.step, Phase.PATROL, fault) for slot, fault in met]

    def read(self, rows: list[Row]) -> None:
        found = []
        for slot, step, phase, fault in rows:
            again = fault in self.known
            self.known.add(fault)
            found.append(finding(slot // SIZE, step, phase=phase, slot=slot, redetection=again))
        self.tracker.found(found, "i", self.step)


@pytest.mark.parametrize(("on_host", "late"), [(True, 0), (False, 0), (False, 3)], ids=["cpu", "gpu", "late"])
def test_every_reader_is_listed(on_host: bool, late: int) -> None:
    readers = 0
    for seed in range(RUNS):
        engine = Engine(seed, on_host=on_host, late=late)
        assert engine.run() == set(), seed
        readers += len(engine.readers)
    assert readers > 4 * RUNS
