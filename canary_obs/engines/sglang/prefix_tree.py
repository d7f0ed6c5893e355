"""SGLang's radix tree as sweeps read it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedCount, CachedSlots
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.errors import UnsupportedEngine

# A walk cannot be cut, and it runs on the scheduler's thread.
_LONGEST_WALK_SECONDS = 0.02
_FIRST_SLOTS = 10_000  # that a first walk may have: the slower of SGLang's two trees takes 3 us for each


class PrefixTree(PrefixCache):
    """The tree's own walk, at once. A cache that would take too long to walk is not swept, and says so."""

    def __init__(self, tree: Any, freed: FreedSlots) -> None:
        self._tree, self._freed = tree, freed
        self._mark = freed.mark()
        self._seconds_per_slot = _LONGEST_WALK_SECONDS / _FIRST_SLOTS

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of the tree's nodes; of those that no running request has locked."""
        del group
        held = self._held
        if (seconds := held * self._seconds_per_slot) > _LONGEST_WALK_SECONDS:
            raise UnsupportedEngine(
                f"SGLang's prefix cache holds {held} tokens, and walking it would hold up the scheduler for "
                f"about {seconds * 1e3:.0f} ms (limit {_LONGEST_WALK_SECONDS * 1e3:.0f} ms): not swept. "
                "The patrol checks its bytes"
            )
        started = time.perf_counter()
        found = self._tree.tree_core.walk_for_kv_canary(unlocked_only=unlocked_only, swa_resident_only=False)
        self._mark = self._freed.mark()
        if held >= _FIRST_SLOTS // 10:  # of few the call itself costs most
            self._seconds_per_slot = (time.perf_counter() - started) / held
        slots, positions, previous = found.slot_indices, found.positions, found.prev_slot_indices
        return CachedSlots(
            slots=slots.to(torch.int64),
            positions=positions.to(torch.int64),
            previous=previous.to(torch.int64),
        )

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: the allocator has not taken them back since the walk."""
        del group
        return self._freed.untouched_since(slots, self._mark)

    def count(self, group: str) -> CachedCount:
        """By the tree's own counters of tokens, which it keeps as nodes come and go."""
        del group
        return CachedCount(slots=self._held, removed=self._freed.total)

    @property
    def _held(self) -> int:
        return int(self._tree.full_evictable_size()) + int(self._tree.full_protected_size())
