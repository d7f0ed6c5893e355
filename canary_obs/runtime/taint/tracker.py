"""From findings to the requests that read damage; extended for as long as the damage stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

import numpy as np

from canary_obs.engine_api.healing import Reached
from canary_obs.engine_api.requests import (
    AddedBlocks,
    BlockTable,
    ChangedRequests,
    GrownBlocks,
    RequestChange,
)
from canary_obs.records import Violation
from canary_obs.runtime.taint.contents import before_filling, readers_of, slot_content
from canary_obs.runtime.taint.copies import Copies
from canary_obs.runtime.taint.damage import Damage
from canary_obs.runtime.taint.doubts import Doubts, Elsewhere
from canary_obs.runtime.taint.good_checks import GoodChecks, GoodTime, is_of_row, of_row
from canary_obs.runtime.taint.held_blocks import HeldBlocks
from canary_obs.runtime.taint.lives import RUNNING
from canary_obs.runtime.taint.reading import ROWS_KEPT, Readers, Reading
from canary_obs.runtime.taint.stored_blocks import NO_BLOCKS
from canary_obs.runtime.taint.watch import Watch
from canary_obs.slot_facts import request_name
from canary_obs.vocabulary import Completeness, Phase, Reason

DAMAGES_KEPT = 256
NOT_SHOWN = "the engine does not show which requests hold the blocks of this group"
_UNNAMED = "the request that read it is no longer known"
# Group, block, whether every forward checks it, and the forward that began to fill the block.
Place = tuple[str, int, bool, int | None]


class TaintTracker:
    """Host data only. A step that changes no block list costs nothing here."""

    def __init__(
        self, tables: Mapping[str, BlockTable], blocks: Mapping[str, int], checks: GoodChecks,
        doubts: Callable[[], str | None], elsewhere: Elsewhere,
    ) -> None:  # fmt: skip
        """`tables`: by group name; groups without one are not followed. `blocks`: of each numbering.

        `doubts`: why a good check or a reader may be missing; None = nothing is known to be.
        `elsewhere`: where blocks may be stored and loaded from with nothing shown; None = nowhere.
        """
        self._tables, self._checks, self._doubts = dict(tables), checks, Doubts(doubts, elsewhere)
        self._blocks, self._numbers, self._rewrites = blocks, 0, False
        self.start(0, 0)
        self.requests: dict[str, Counter[Completeness]] = {}  # that read damage, by group

    def start(self, running: int | None, step: int) -> None:
        """Begin after forward `step`, and forget everything.

        `running`: requests that the engine runs now, which nobody has shown. None = not known.
        """
        rows = max(ROWS_KEPT, 2 * max(self._blocks.values(), default=0))
        self.readers, self.watch = Readers(self._tables, rows), Watch(self._blocks)
        self.damages: dict[int, Damage] = {}
        self._copies = Copies(self._doubts.elsewhere, self.damages)
        self._by_place: dict[Place, Damage] = {}
        self._doubts.start(nobody_runs=running == 0)
        self._listed = 0, b"", b""  # damage, lives and forwards that were listed last
        # Damages of bytes found now: what was found last, and whether it is written over.
        self._fresh: dict[int, tuple[Violation, bool]] = {}
        self._checks.began = self._followed = step  # followed: the forward before the last changes
        self.pending = False  # there is something to report

    def lost(self, until: int | None) -> None:
        """What the engine showed could not be followed: up to this forward, or, with None, from now on."""
        if until is None:
            self._doubts.lose()
        else:
            self.readers.miss(until)

    # What the engine shows.

    def follow(self, shown: ChangedRequests, step: int) -> None:
        """Requests ended after forward `step`, or read more blocks from the next one on."""
        self._rewrites |= shown.rewrites
        for name, emitted in shown.ended.items():
            if (life := self.readers.end(request_name(name), step, emitted)) is not None:
                self.watch.carriers.pop(life, None)
                self._note(life)
        self.pending |= self._copies.follow(shown, step, self.readers, self.watch)
        for change in shown.changed:
            self._change(change, self._followed + 1 if shown.late and not change.begins else step + 1)
        for table, grown in shown.grown.items():
            self._grow(table, grown, step + 1)
        self._followed = step
        if self.readers.full:
            self._forget(step)

    def _change(self, change: RequestChange, step: int) -> None:
        if (life := self.readers.begin(request_name(change.request), change, step)) is None:
            return
        copies = self._copies.begun(change, step, self.readers)
        self.readers.add(life, change, step)
        if not self.watch.active:
            return
        if change.begins and change.emitted is not None:
            self._note(life)
        for name, added in change.added.items():
            for number in self.watch.joined(name, added, copies.get(name, NO_BLOCKS)):
                own, row = self._tables[self.damages[number].row.group], self.damages[number].row
                direct = own.name == name and row.slot // own.block_slots in added.blocks[: added.joined]
                self._reads(self.damages[number], [Reading(life, step, not direct)])
            self.watch.fill(name, added, life, copies.get(name, NO_BLOCKS))
            for number in self.watch.arrived(name, added):
                self._reads(self.damages[number], [Reading(life, step, False)])
        self._copies.filled(life, self.readers)

    def _grow(self, table: str, grown: GrownBlocks, step: int) -> None:
        lives, grown = self.readers.add_one_each(table, grown, step)
        rows = zip(lives, grown.blocks, grown.numbers, strict=True)
        for life, block, number in rows if self.watch.active else ():
            added = AddedBlocks(np.array([block]), number, 0)
            self.watch.fill(table, added, life)
            self._copies.filled(life, self.readers)
            for number in self.watch.arrived(table, added):
                self._reads(self.damages[number], [Reading(life, step, False)])

    def _note(self, life: int) -> None:
        """A life ended, or goes on from another one: what is listed of its request changes."""
        self._copies.filled(life, self.readers)
        for damage in self.damages.values():
            self.pending |= damage.note(self.readers.lives.up_to(life))

    def _forget(self, step: int) -> None:
        lives, unsent = self.readers.lives, (damage.unsent for damage in self.damages.values())
        earlier = (lives.up_to(life)[1:] for life in lives.running.values())
        pinned = set(self.watch.carriers).union(*unsent, *earlier)
        numbers = {int(old): new for new, old in enumerate(self.readers.forget(pinned, step))}
        for damage in self.damages.values():
            damage.renumber(numbers)
        self.watch.renumber(numbers)
        self._copies.renumber(numbers)

    # What the checks find.

    def found(self, rows: Sequence[Violation], incident: str, step: int, *, dropped: bool = False) -> None:
        """Findings and redetections, as they are read; `incident`: the name for new ones.

        `dropped`: others were found and overwritten before they could be read.
        """
        self._doubts.dropping, self._listed = dropped, (0, b"", b"")
        self._fresh.clear()
        if dropped:
            self._checks.dropped = step
        for row in sorted(rows, key=lambda row: row.step):
            table = self._tables.get(row.group)
            if table is None or not row.slot >= 0:
                if not row.redetection:
                    self._add((row.group, row.slot, is_of_row(row), None), row, incident, NOT_SHOWN)
            elif is_of_row(row):
                self._find_row(row, incident, step)
            else:
                self._find_bytes(row, incident, step)

    def _find_row(self, row: Violation, incident: str, step: int) -> None:
        """A check that every forward makes for each of its requests: who was in it is tainted."""
        held, block = self._held(row)
        damage = self._by_place.get(place := (row.group, block, True, None))
        if damage is None or (damage.incident != incident and not row.redetection):
            damage = self._add(place, row, incident, self._doubt(of_row(row), step), of_row(row))
        self._copies.found(damage, row)
        name = row.request
        if name is not None and name in damage.rows:
            return
        named = None if name is None else self.readers.life_at(name, row.step)
        if named is None and row.phase in (Phase.HEAD, Phase.TAIL):
            damage.doubt(_UNNAMED)
        if name is not None and named is not None:
            damage.rows.add(name)
            self._reads(damage, [Reading(named, row.step, False)])
            if not held.holds(named, block):
                return  # its table is wrong, not the slot
        lives, starts, _ = held.of_content(block, held.content(block, row.step, before_refill=False))
        there = (self.readers.lives.last[lives] >= row.step) & (starts <= row.step)
        self._reads(damage, [Reading(life, row.step, False) for life in lives[there].tolist()])

    def _find_bytes(self, row: Violation, incident: str, step: int) -> None:
        """A check made now and then: whoever read the slot since the last good one is tainted."""
        # Before a forward bytes are compared that it writes over, those that have just arrived from a peer,
        # and those that a load was about to write over.
        arrived = row.phase is Phase.HEAD and row.peer is not None
        before_load = self._checks.before_load(row)
        (held, block), own = self._held(row), self._tables[row.group]
        table = own.name
        if row.redetection and self._is_followed(row.group, block, self.watch.at(table, block)):
            return
        overwritten = row.phase is Phase.HEAD and row.reason is Reason.KV_DATA
        same = self._rewrites and not row.redetection  # else it is followed, or its block filled anew
        before_refill = overwritten and not (arrived or before_load or same or own.rewritten)
        written = None if arrived or before_refill else self._checks.written(row)
        if arrived:
            content = held.content(block, row.step + 1, before_refill=False)
        else:
            content = slot_content(
                row, own, self.readers, row.step, overwritten=before_refill, written=written
            )
        place = row.group, block, False, content.since
        damage = self._by_place.get(place)
        if damage is not None and row.redetection:
            return
        if overwritten and same and not (own.rewritten or before_load or arrived):
            written = before_filling(held, block, row.step, content)
        lives, starts, joined, refilled = readers_of(held, block, content, written)
        good = of_row(row) if arrived else self._checks.last(row, content, (starts, joined))
        if damage is None or damage.incident != incident:
            damage = self._add(place, row, incident, self._doubt(good, step), good)
            if content.until is None and not refilled:
                damage.covers = self.watch.at(table, block)
                self.watch.set(table, block, damage.number)
            if arrived:
                self.watch.expect(table, block, damage.number)
        elif good < damage.good:
            damage.good = good
            if (doubt := self._doubt(good, step)) is not None:
                damage.doubt(doubt)
        self._copies.found(damage, row)
        if not row.redetection:
            self._fresh[damage.number] = row, content.until is not None or overwritten or refilled
        first = damage.good.first_forward
        there = self.readers.lives.last[lives] >= first
        lives, starts = lives[there], np.maximum(starts[there], first)
        listed = damage.number, lives.tobytes(), starts.tobytes()
        if listed != self._listed:  # most slots of a block have the readers of the one before
            self._reads(damage, list(map(Reading, lives.tolist(), starts.tolist(), repeat(False))))
            self._listed = listed

    def reached(self) -> list[Reached]:
        """How far the damages of bytes have come that the last `found` was of."""
        return [
            self.damages[number].reached(self.readers, self.watch.slots(number, self._tables), *now)
            for number, now in self._fresh.items()
            if number in self.damages
        ]

    def repaired(self, group: str, slot: int) -> bool:
        """The block of a slot found damaged now is put back; returns whether all who read it are known."""
        name, size = self._tables[group][:2]
        number = self.watch.at(name, slot // size)
        if number not in self._fresh or not self.damages[number].is_all_of(group, slot // size, size):
            return False
        self.watch.set(name, slot // size, 0)
        self._fresh[number] = self._fresh[number][0], True
        self._by_place = {place: one for place, one in self._by_place.items() if one.number != number}
        return True

    def _is_followed(self, group: str, block: int, number: int) -> bool:
        row = self.damages[number].row if number else None
        return row is not None and row.group == group and self._held(row)[1] == block

    def _doubt(self, good: GoodTime, step: int) -> str | None:
        """Why it is not known who has read since a good check."""
        return self._doubts.since(good, step, self.readers.forgotten_until(step))

    def _held(self, row: Violation) -> tuple[HeldBlocks, int]:
        table = self._tables[row.group]
        return self.readers.held[table.name], row.slot // table.block_slots

    def _add(
        self, place: Place, row: Violation, incident: str, doubt: str | None, good: GoodTime | None = None
    ) -> Damage:
        self._numbers += 1
        self.watch.begin()
        damage = Damage(
            number=self._numbers, incident=incident, row=row, good=good or of_row(row), cause=doubt
        )
        self.damages[damage.number] = self._by_place[place] = damage
        self.requests.setdefault(row.group, Counter())
        if len(self.damages) > DAMAGES_KEPT:
            oldest = self.damages.pop(next(iter(self.damages)))
            self._by_place = {place: one for place, one in self._by_place.items() if one is not oldest}
            self.watch.forget(oldest.number)
        self.pending = True
        return damage

    def _reads(self, damage: Damage, readings: Sequence[Reading]) -> None:
        """These lives read it, and whoever read what they filled since."""
        known = damage.readings
        fresh = [one for one in readings if (before := known.get(one.life)) is None or before.step > one.step]
        if not fresh:
            return  # what they filled since is followed
        reached = self.readers.reached(fresh)
        self._copies.read(damage, reached.readings, self.readers)
        for one in reached.readings:
            if damage.add(one):
                self.requests[damage.row.group][damage.completeness] += 1
            if self.readers.lives.last[one.life] == RUNNING:
                self.watch.carriers[one.life] = damage.number
        for name, blocks in reached.blocks.items():
            self.watch.set(name, blocks, damage.number)
        self.pending = True
