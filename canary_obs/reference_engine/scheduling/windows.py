"""What the sliding windows of running requests still see, and which window slots may go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from canary_obs.reference_engine.cache.radix_cache import RadixCache
from canary_obs.reference_engine.cache.window_slots import Slots, WindowSlots
from canary_obs.reference_engine.scheduling.request import Request


class SlidingWindows:
    """Policy over window slots. A request sees positions from `window_start` on.

    Generated tokens give their slot up as the window leaves them; prompt tokens wait for pressure, since
    another request may branch off there.
    """

    def __init__(self, slots: WindowSlots, cache: RadixCache) -> None:
        self.slots, self._cache = slots, cache
        self.evicted = 0  # tombstones made since the engine started
        self.joined = 0  # window slots of shared prefixes that admitted requests see, since then

    def enter(self, request: Request) -> None:
        """An admitted request sees the end of its shared prefix: keep that."""
        request.window_start = self._first_seen(request)
        seen = request.slots[request.window_start : request.shared]
        self.slots.locks[seen] += 1
        self.joined += seen.size

    def slide(self, request: Request) -> None:
        """Leave what the next forward of a running request does not see."""
        old, new = request.window_start, self._first_seen(request)
        if new <= old:
            return
        self.slots.locks[request.slots[old : min(new, request.shared)]] -= 1
        request.window_start = new
        first = max(old, request.shared, request.prompt_length)
        self.evicted += self.slots.drop(request.slots[first:new])

    def leave(self, request: Request) -> None:
        """A request stops running: it sees nothing any more."""
        self.slots.locks[request.slots[request.window_start : request.shared]] -= 1
        request.window_start = 0

    def extend(self, request: Request, extend: int, running: Sequence[Request]) -> bool:
        """Window slots for the next `extend` tokens, evicting what nobody sees. False = not enough."""
        full = request.slots[request.computed : request.computed + extend]
        full = full[~self.slots.resident(full)]
        if full.size > self.slots.free_slots and not self._evict(full.size, running):
            return False
        self.slots.give(full)
        return True

    def hold(self, full: Slots, running: Sequence[Request]) -> Slots | None:
        """Keep the window slots of cached full slots, and give one to each that has none, until `let_go`.

        Returns those that got one; None = not enough, and nothing is kept.
        """
        self.slots.locks[full] += 1
        bare = full[~self.slots.resident(full)]
        if bare.size > self.slots.free_slots and not self._evict(bare.size, running):
            self.let_go(full)
            return None
        self.slots.give(bare)
        return bare

    def resident_end(self, full: Slots) -> Slots:
        """The last of these full slots, as many as have window slots without a gap."""
        bare = np.flatnonzero(~self.slots.resident(full))
        return full[bare[-1] + 1 :] if bare.size else full

    def let_go(self, full: Slots) -> None:
        """Undo one `hold` of the same full slots."""
        self.slots.locks[full] -= 1

    def available(self, running: Sequence[Request]) -> int:
        """Window slots that are free or could be."""
        held = self._cache.held()
        cached = int((self.slots.resident(held) & (self.slots.locks[held] == 0)).sum())
        return self.slots.free_slots + cached + sum(int(self._left(r).size) for r in running)

    def _evict(self, wanted: int, running: Sequence[Request]) -> bool:
        if wanted > self.available(running):
            return False
        for slots in self._candidates(running):
            self.evicted += self.slots.drop(slots)
            if self.slots.free_slots >= wanted:
                break
        return True

    def _candidates(self, running: Sequence[Request]) -> Iterator[Slots]:
        for request in running:
            yield self._left(request)
        for node in self._cache.oldest_first():
            yield node.slots[self.slots.locks[node.slots] == 0]

    def _left(self, request: Request) -> Slots:
        """Resident slots of a request's own that its window has left."""
        own = request.slots[request.shared : request.window_start]
        return own[self.slots.resident(own)]

    def _first_seen(self, request: Request) -> int:
        return max(0, request.computed - self.slots.window + 1)
