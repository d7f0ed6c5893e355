"""KV computed from damage that may be stored in a lower tier: who loads it there is not followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from canary_obs.runtime.taint.damage import Damage
from canary_obs.runtime.taint.lives import RUNNING
from canary_obs.runtime.taint.reading import Readers, Reading


class Copies:
    """Doubts whether all readers of a damage are known once one of them has filled a whole block since."""

    def __init__(self, elsewhere: Callable[[], str | None]) -> None:
        """`elsewhere`: where whole blocks may be stored and loaded from; None = nowhere."""
        self._elsewhere = elsewhere
        self._partial: set[int] = set()  # lives that read damage and run, and filled no whole block since

    def read(self, damage: Damage, readings: Sequence[Reading], readers: Readers) -> None:
        """These lives read it."""
        if not damage.in_doubt and (place := self._elsewhere()) is not None:
            if readers.fill_whole(readings):
                damage.doubt_copies(place)
            last = readers.lives.last
            self._partial |= {one.life for one in readings if last[one.life] == RUNNING}

    def filled(self, life: int, damages: Mapping[int, Damage], readers: Readers) -> None:
        """A life got blocks, or ended."""
        if life not in self._partial or (place := self._elsewhere()) is None:
            return
        read = [one for one in damages.values() if life in one.readings]
        whole = [one for one in read if readers.fill_whole([one.readings[life]])]
        for damage in whole:
            damage.doubt_copies(place)
        if len(whole) == len(read):
            self._partial.discard(life)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Lives have new numbers; those that are forgotten have none."""
        self._partial = {numbers[life] for life in self._partial if life in numbers}
