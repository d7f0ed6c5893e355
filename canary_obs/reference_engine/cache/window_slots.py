"""Slots of sliding-window layers: owned by the full slots of the same tokens, and gone before them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from canary_obs.reference_engine.cache.pool import PageAllocator, PoolError

Slots = NDArray[np.int64]
NONE = -1  # a full slot without a window slot: a tombstone


class WindowSlots:
    """Which window slot each full slot has, on the host. Slots are int64 arrays."""

    def __init__(self, window: int, num_full: int, num_slots: int) -> None:
        self.window = window
        self.clock = 0  # advances whenever full slots get window slots
        self.of = np.full(num_full, NONE, dtype=np.int64)  # [full slots]; NONE = tombstone
        self.owner = np.full(num_slots, NONE, dtype=np.int64)  # [window slots]; full slot, NONE = free
        self.given_at = np.zeros(num_full, dtype=np.int64)  # [full slots]; clock
        self.locks = np.zeros(num_full, dtype=np.int64)  # [full slots]; running requests that see it
        self.dropped = 0  # window slots taken back since the start
        self.pool = PageAllocator(num_slots, 1)
        self._changed: list[Slots] = []

    @property
    def free_slots(self) -> int:
        """Window slots that can be given now."""
        return self.pool.free_pages

    def resident(self, full: Slots) -> NDArray[np.bool_]:
        """Whether each full slot has a window slot."""
        return self.of[full] >= 0

    def give(self, full: Slots) -> None:
        """A window slot for each of these tombstones. The caller has checked free_slots."""
        self._assign(full, self.pool.allocate(full.size))

    def drop(self, full: Slots) -> int:
        """Take their window slots from these full slots, where they have one; returns how many."""
        full = full[self.resident(full)]
        if self.locks[full].any():
            raise PoolError(
                f"window slots of full slots {full[self.locks[full] > 0][:8].tolist()}... are in the window "
                "of a running request; unlock first"
            )
        self.pool.free(self.of[full])
        self.owner[self.of[full]] = NONE
        self.of[full] = NONE
        self._changed.append(full)
        self.dropped += int(full.size)
        return int(full.size)

    def move(self, source: Slots, destination: Slots) -> None:
        """Same tokens, other full slots: tombstones of `destination` take what `source` has."""
        takes = self.resident(source) & ~self.resident(destination)
        source, destination = source[takes], destination[takes]
        moved = self.of[source]
        self.of[source] = NONE
        self._changed.append(source)
        self._assign(destination, moved)

    def resumable(self, full: Slots, page_size: int) -> int:
        """Longest prefix, in whole pages, whose last window is resident: a request can go on from there."""
        ends = np.arange(full.size + 1)
        # [n + 1]: end of the last tombstone before each length; a resumable length is a window away from it.
        after = np.concatenate([[0], np.maximum.accumulate(np.where(self.resident(full), 0, ends[1:]))])
        fits = (ends - after >= np.minimum(ends, self.window - 1)) & (ends % page_size == 0)
        return int(np.flatnonzero(fits)[-1])

    def changes(self) -> tuple[Slots, Slots]:
        """Full slots whose window slot changed since the last call, and what they have now."""
        full = np.unique(np.concatenate(self._changed)) if self._changed else np.empty(0, np.int64)
        self._changed.clear()
        return full, self.of[full]

    def _assign(self, full: Slots, mine: Slots) -> None:
        self.clock += 1
        self.of[full], self.owner[mine], self.given_at[full] = mine, full, self.clock
        self._changed.append(full)


class HybridAllocator(PageAllocator):
    """Full slots whose window slots are freed with them, wherever they are freed."""

    def __init__(self, num_slots: int, page_size: int, windows: WindowSlots) -> None:
        super().__init__(num_slots, page_size)
        self._windows = windows

    def free(self, slots: Slots) -> None:
        """Take back whole pages, given as their slots in page order."""
        super().free(slots)
        self._windows.drop(slots)
