"""KV computed from damage that may be stored in a lower tier, and is loaded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.runtime.taint.damage import Damage
from canary_obs.runtime.taint.doubts import Elsewhere
from canary_obs.runtime.taint.lives import RUNNING
from canary_obs.runtime.taint.reading import Readers, Reading
from canary_obs.runtime.taint.watch import Watch


class Copies:
    """Doubts whether all readers of a damage are known once one of them has filled a whole block since."""

    def __init__(self, elsewhere: Elsewhere, damages: Mapping[int, Damage]) -> None:
        """`elsewhere`: where blocks may be stored and loaded from with nothing shown; None = nowhere."""
        self._elsewhere, self._damages = elsewhere, damages
        self._partial: set[int] = set()  # lives that read damage and run, and filled no whole block since

    def follow(self, shown: ChangedRequests, step: int, readers: Readers, watch: Watch) -> None:
        """Copies were stored after forward `step`, or are in blocks from the next one on."""
        readers.lives.drafting |= shown.rewrites
        for name, stored in shown.stored.items():
            readers.stored[name].store(stored, step)
        for name, loaded in shown.loaded.items():
            for block, fillers in readers.stored[name].load(loaded, step + 1):
                for filler, damage in product(fillers, self._damages.values() if fillers else ()):
                    if readers.is_derived(name, filler, damage.readings):
                        watch.set(name, block, damage.number)

    def read(self, damage: Damage, readings: Sequence[Reading], readers: Readers) -> None:
        """These lives read it."""
        if not damage.in_doubt and (stored := self._elsewhere()) is not None:
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
