"""Walks over the slots of a prefix cache, as sweeps take them: some at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from canary_obs.engine_api.views import CachedSlots


class CachedWalk(ABC):
    """What a group's prefix cache held at one moment. Slots that left it since are shown, too."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Slots of the whole walk."""

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait for the device. If not, a sweep goes on in a later step."""
        return True

    @abstractmethod
    def take(self, limit: int) -> CachedSlots:
        """The next slots, about `limit` of them; none = the walk has ended.

        Where a slot left the cache since the walk began, its position and its previous slot may be anything.
        """


class WholeWalk(CachedWalk):
    """A walk over slots that are all at hand."""

    def __init__(self, cached: CachedSlots) -> None:
        self._cached, self._shown = cached, 0

    @property
    def total(self) -> int:
        """Slots of the whole walk."""
        return self._cached.slots.numel()

    def take(self, limit: int) -> CachedSlots:
        """The next slots, at most `limit`."""
        part = slice(self._shown, min(self._shown + limit, self.total))
        self._shown = part.stop
        cached = self._cached
        return CachedSlots(
            slots=cached.slots[part], positions=cached.positions[part], previous=cached.previous[part]
        )
