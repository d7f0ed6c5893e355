"""Finds slots that are damaged again after they were written anew: their memory is not to be trusted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

SECONDS = 86_400.0
_REMEMBERED = 8192  # slots


class RepeatedDamage:
    """Damage of a slot counts once for each content; the second within 24 hours is one too many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[tuple[int, int, int], tuple[float, int]] = OrderedDict()

    def again(self, group: int, block: int, slot: int, generation: int) -> bool:
        """Note damage of a slot; whether an earlier generation of its content was damaged there, too."""
        now, key = self._clock(), (group, block, slot)
        seen = self._seen.pop(key, None)
        self._seen[key] = (now, generation)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return seen is not None and now - seen[0] < SECONDS and seen[1] != generation

    def forget(self, group: int, block: int) -> None:
        """An operator brought the block back."""
        for key in [key for key in self._seen if key[:2] == (group, block)]:
            del self._seen[key]
