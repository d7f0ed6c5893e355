"""KV computed from damage that may be stored in a lower tier, and is loaded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from canary_obs.engine_api.requests import ChangedRequests, RequestChange
from canary_obs.records import Violation
from canary_obs.runtime.taint.damage import Damage
from canary_obs.runtime.taint.doubts import Elsewhere
from canary_obs.runtime.taint.held_blocks import Ints
from canary_obs.runtime.taint.lives import RUNNING
from canary_obs.runtime.taint.reading import Readers, Reading
from canary_obs.runtime.taint.stored_blocks import UNKNOWN, Origin
from canary_obs.runtime.taint.watch import Watch
from canary_obs.vocabulary import Phase, Reason

_A_TIER = "a lower tier"


class Copies:
    """Doubts whether all readers of a damage are known once one of them has filled a whole block since."""

    def __init__(self, elsewhere: Elsewhere, damages: Mapping[int, Damage]) -> None:
        """`elsewhere`: where blocks may be stored and loaded from; None = nowhere, or all of it is shown."""
        self._elsewhere, self._damages = elsewhere, damages
        self._partial: set[int] = set()  # lives that read damage and run, and filled no whole block since

    def follow(self, shown: ChangedRequests, step: int, readers: Readers, watch: Watch) -> bool:
        """Copies were stored after forward `step`, or are in blocks from the next one on.

        Returns whether one of these may have been computed from damage, and nobody knows.
        """
        doubted = False
        readers.lives.drafting |= shown.rewrites
        for name, stored in shown.stored.items():
            readers.stored[name].store(stored, step)
        for name, loaded in shown.loaded.items():
            origins = readers.stored[name].load(loaded, step + 1)
            if self._damages:
                marks, known = self._marks(name, origins, readers)
                watch.set(name, loaded.blocks, marks)
                doubted |= not known
        if doubted:
            stored_in = self._elsewhere()
            for damage in self._damages.values():
                damage.doubt_copies(_A_TIER if stored_in is None else stored_in.place)
        return doubted

    def begun(self, change: RequestChange, step: int, readers: Readers) -> dict[str, Ints]:
        """By numbering: blocks with which a request begins that hold copies, loaded for it or for others."""
        found = {}
        for name, added in change.added.items() if change.begins else ():
            there = -(-change.computed // readers.tokens[name]) - added.first
            if there > added.joined:
                copies = readers.stored[name].begun(added.blocks[added.joined : there], step)
                if copies.size:
                    found[name] = copies
        return found

    def _marks(self, name: str, origins: Sequence[Origin], readers: Readers) -> tuple[Ints, bool]:
        """The damage from which each of these was computed, 0 = none; and whether that is known of all."""
        contents = {(one.block, one.since) for one in origins if one.since is not None}
        fillers = readers.held[name].fillers_of(contents)
        lives = {life for filled in fillers.values() for life, _ in filled}
        derived = {
            life: [
                (readers.first_derived(name, damage.readings[life]), damage.number)
                for damage in self._damages.values()
                if life in damage.readings
            ]
            for life in lives
        }
        marks = {
            content: max(
                (own for life, number in filled for first, own in derived[life] if number >= first), default=0
            )
            for content, filled in fillers.items()
        }
        found = [marks.get((one.block, one.since or 0), 0) for one in origins]
        known = UNKNOWN not in origins and len(fillers) == len(contents)
        return np.array(found, dtype=np.int64), known

    def found(self, damage: Damage, row: Violation) -> None:
        """A row of this damage. Copies of some damage pass for right ones, so that no load finds it."""
        by_records = row.reason is Reason.KV_DATA and (row.phase is not Phase.HEAD or row.peer is None)
        if not by_records and (stored := self._elsewhere()) is not None and stored.shown:
            damage.doubt_copies(stored.place)

    def read(self, damage: Damage, readings: Sequence[Reading], readers: Readers) -> None:
        """These lives read it."""
        if not damage.in_doubt and (stored := self._elsewhere()) is not None and not stored.shown:
            if not stored.whole or readers.fill_whole(readings):
                damage.doubt_copies(stored.place)
            last = readers.lives.last
            self._partial |= {one.life for one in readings if last[one.life] == RUNNING}

    def filled(self, life: int, readers: Readers) -> None:
        """A life got blocks, or ended."""
        if life not in self._partial or (stored := self._elsewhere()) is None:
            return
        read = [one for one in self._damages.values() if life in one.readings]
        whole = [one for one in read if readers.fill_whole([one.readings[life]])]
        for damage in whole:
            damage.doubt_copies(stored.place)
        if len(whole) == len(read):
            self._partial.discard(life)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Lives have new numbers; those that are forgotten have none."""
        self._partial = {numbers[life] for life in self._partial if life in numbers}
