"""SGLang's radix tree as sweeps read it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from canary_obs.copy_records.draft_trees import SlotMap
from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedCount, CachedSlots
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.sglang.groups import FULL, SWA
from canary_obs.engines.sglang.physical_slots import PhysicalSlots
from canary_obs.engines.sglang.states import STATE
from canary_obs.errors import UnsupportedEngine

# A walk cannot be cut, and it runs on the scheduler's thread.
LONGEST_WALK_SECONDS = 0.02
_FIRST_SLOTS = 10_000  # that a first walk may have: the slower of SGLang's two trees takes 3 us for each


class PrefixTree(PrefixCache):
    """The tree's own walk, at once. A cache that would take too long to walk is not swept, and says so.

    What a slot takes is the less of the last two walks: one that was held up does not end all that follow.
    """

    def __init__(
        self,
        tree: Any,
        freed: Mapping[str, FreedSlots],
        own_slots: Mapping[str, SlotMap] = MappingProxyType({}),
        ratios: Mapping[str, int] = MappingProxyType({}),
        windowed: Collection[str] = (SWA,),
    ) -> None:
        """`freed`: by group. `own_slots`: a group's slots by those of the tree, where they are others.

        `ratios`: tokens of a slot, by group; 1 where a group is not among them. `windowed`: groups of layers
        with a sliding window.
        """
        self._windowed = frozenset(windowed)
        self._ratios = ratios
        self._tree, self._freed, self._own_slots = tree, freed, own_slots
        self._marks = {group: each.mark() for group, each in freed.items()}
        self._seconds_per_slot = deque([LONGEST_WALK_SECONDS / _FIRST_SLOTS], maxlen=2)  # of the last walks

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of the tree's nodes; of those that no running request has locked.

        In a window group, those of nodes that keep their window slots.
        """
        if group == STATE:  # nobody writes to them there, locked or not
            self._marks[group] = self._freed[group].mark()
            states = self._tree.all_mamba_values_flatten().to(torch.int64)
            return _states(_own(own, states) if (own := self._own_slots.get(group)) is not None else states)
        held = self._held(FULL)  # a walk of a window group passes them all
        if (seconds := held * min(self._seconds_per_slot)) > LONGEST_WALK_SECONDS:
            raise walk_too_long(f"{held} tokens", seconds)
        started = time.thread_time()  # what other processes do with the cores is not the walk's
        found = self._tree.tree_core.walk_for_kv_canary(
            unlocked_only=unlocked_only, swa_resident_only=group in self._windowed
        )
        self._marks[group] = self._freed[group].mark()
        if held >= _FIRST_SLOTS // 10:  # of few the call itself costs most
            self._seconds_per_slot.append((time.thread_time() - started) / held)
        slots, previous = found.slot_indices.to(torch.int64), found.prev_slot_indices.to(torch.int64)
        if (own := self._own_slots.get(group)) is not None:
            slots, previous = _own(own, slots), _own(own, previous)
            previous = torch.where(previous > 0, previous, -1)
        if (ratio := self._ratios.get(group, 1)) > 1:
            return _entries(slots, found.positions.to(torch.int64), previous, ratio)
        return CachedSlots(slots=slots, positions=found.positions.to(torch.int64), previous=previous)

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: the allocator has not taken them back since the walk."""
        return self._freed[group].untouched_since(slots * self._ratios.get(group, 1), self._marks[group])

    def count(self, group: str) -> CachedCount:
        """By the tree's own counters of tokens, which it keeps as nodes come and go."""
        ratio = self._ratios.get(group, 1)
        return CachedCount(slots=self._held(group) // ratio, removed=self._freed[group].total // ratio)

    def swa_resident(self, group: str, slots: Tensor) -> Tensor | None:
        """bool [n]: by the allocator's mapping; None = there is no window group."""
        if (windows := self._own_slots.get(SWA)) is None:
            return None
        if group in self._windowed:
            return slots > 0
        if isinstance(full := self._own_slots.get(FULL), PhysicalSlots):
            slots = full.virtual(slots)
        return _own(windows, slots * self._ratios.get(group, 1)) > 0

    def _held(self, group: str) -> int:
        tree = self._tree
        if group in self._windowed:
            return int(tree.swa_evictable_size()) + int(tree.swa_protected_size())
        if group == STATE:
            return int(tree.mamba_evictable_size()) + int(tree.mamba_protected_size())
        return int(tree.full_evictable_size()) + int(tree.full_protected_size())


def _own(own: SlotMap, slots: Tensor) -> Tensor:
    """int64 [n]: a group's slots by those of the tree; 0 = none, also for -1."""
    return torch.where(slots >= 0, own[slots], 0)


def _states(slots: Tensor) -> CachedSlots:
    """States follow none."""
    return CachedSlots(slots=slots, positions=torch.zeros_like(slots), previous=torch.full_like(slots, -1))


def _entries(slots: Tensor, positions: Tensor, previous: Tensor, ratio: int) -> CachedSlots:
    """Entries of whole runs, by their tokens; the one before is that of the token before the run's first."""
    before = torch.full((int(slots.max()) + 1 if slots.numel() else 1,), -1, dtype=torch.int64)
    before[slots] = previous
    last = positions % ratio == ratio - 1
    ends = slots[last]
    earlier = before[ends - (ratio - 1)]
    return CachedSlots(
        slots=ends // ratio,
        positions=positions[last] // ratio,
        previous=torch.where(earlier >= 0, earlier // ratio, -1),
    )


def walk_too_long(held: str, seconds: float | None) -> UnsupportedEngine:
    """Why a cache that holds so much is not swept. `seconds` of a walk; None = more than the limit."""
    limit = f"{LONGEST_WALK_SECONDS * 1e3:.0f} ms"
    took = f"more than {limit}" if seconds is None else f"about {seconds * 1e3:.0f} ms (limit {limit})"
    return UnsupportedEngine(
        f"SGLang's prefix cache holds {held}, and walking it would hold up the scheduler for {took}: not "
        "swept. The patrol checks its bytes"
    )
