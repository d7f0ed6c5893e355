"""Counts the blocks in vLLM's map of cached blocks, apart from the events that workers follow."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.scheduler_reports import FAULTS_ATTRIBUTE, log_fault

_Groups = NDArray[np.int64] | None  # of changes; None = the pool has one
_Make = Callable[[Callable[..., Any]], Callable[..., Any]]
# Of SchedulerOutput: BlockCounts by vLLM's group number, or Later of them, in the process that made it.
COUNTS_ATTRIBUTE = "kv_canary_cached_counts"
COUNT = "_kv_canary_count"  # of BlockHashToBlockMap: its MapCount
_MOST_CHANGES = 1 << 12  # that are counted together
_MANY_CHANGES = 32  # with fewer, a call of NumPy takes longer than they do
_MOST_ROUNDS = 4  # of changes that are counted together, none of a block twice
_FIRST_BLOCKS = 1 << 10


class BlockCounts(NamedTuple):
    """Blocks of one group."""

    cached: int  # in the map now
    removed: int  # left the map since it was first counted
    # Tokens that cached blocks have room for, beyond those that they are cached with -> of how many blocks.
    room: tuple[tuple[int, int], ...] = ()


class MapCount:
    """The blocks of one map. A block belongs to one group and may have several keys."""

    def __init__(self, patches: MethodPatches | None = None) -> None:
        """`patches` wrap one map's methods; None = those of the class are wrapped."""
        self.patches = patches
        self._keys = np.zeros(_FIRST_BLOCKS, dtype=np.int32)  # by block
        self._places = np.zeros(_FIRST_BLOCKS, dtype=np.int64)  # by block, while changes are counted
        self._unfilled: dict[int, int] = {}  # by block, where its only key stands for a part of it
        self._cached: dict[int, int] = {}  # by group, as are those below
        self._removed: dict[int, int] = {}
        self._short: dict[int, Counter[int]] = {}  # blocks, by the room that they have
        # What `all_counts` has returned last; None = something has changed since, as do `changes`.
        self.reported: tuple[BlockCounts, ...] | None = None
        # Blocks that have gained a key, or ~block where one was dropped: in order, not counted yet.
        self.changes = array("q")
        self.keys: list[Any] | None = []  # of the changes; None = the pool has one group
        self._later: Later[tuple[BlockCounts, ...]] | None = None  # of changes before those

    def note(self, key: Any, change: int) -> None:
        """A change. Wrappers of the map's methods spell it out: a prompt calls them hundreds of times."""
        self.changes.append(change)
        if self.keys is not None:
            self.keys.append(key)

    def later_counts(self, groups: int, scheduler: Any) -> Later[tuple[BlockCounts, ...]]:
        """`all_counts` as of now, computed when it is asked for; None = that failed, which was logged."""

        def compute() -> tuple[BlockCounts, ...] | None:
            self._later = None
            try:
                self._add(*given)
                return self._report(groups)
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler, or its worker, must go on
                log_fault(scheduler, send_counts.__name__, error)
                return None

        if self._later is not None:
            self._later.get()
        given, self._later = self._take(), Later(compute)
        return self._later

    def settle(self) -> None:
        """Count the changes so far: when somebody asks, or there are many."""
        if self._later is not None:
            self._later.get()
        if self.changes:
            self._add(*self._take())

    def _take(self) -> tuple[array[int], list[Any] | None]:
        """The changes so far, and their keys: what was reported is not true any more."""
        given = self.changes, self.keys
        self.changes, self.keys, self.reported = array("q"), None if self.keys is None else [], None
        return given

    def _add(self, changes: array[int], keys: list[Any] | None) -> None:
        numbers = np.frombuffer(changes, dtype=np.int64)
        blocks = np.maximum(numbers, ~numbers)
        if (highest := int(blocks.max())) >= self._keys.size:
            self._keys = np.concatenate((self._keys, np.zeros(highest + 1, dtype=np.int32)))
            self._places = np.zeros(self._keys.size, dtype=np.int64)
        groups = None if keys is None else np.array(list(map(_group_reader(), keys)), dtype=np.int64)
        if len(changes) < _MANY_CHANGES or self._unfilled:
            self._one_by_one(groups, numbers)
            return
        # A prompt displaces blocks that it then takes itself: the first change of each block, and so on.
        for _ in range(_MOST_ROUNDS):
            places = np.arange(blocks.size)
            self._places[blocks[::-1]] = places[::-1]  # the last that is assigned stays
            first = self._places[blocks] == places
            gained, own = numbers[first] >= 0, blocks[first]
            before = self._keys[own]
            self._keys[own] = np.maximum(before + np.where(gained, 1, -1), 0)
            of, groups = (None, None) if groups is None else (groups[first], groups[~first])
            self._count(of, gained & (before == 0), 1)
            self._count(of, ~gained & (before <= 1), -1)
            numbers, blocks = numbers[~first], blocks[~first]
            if not blocks.size:
                return
        self._one_by_one(groups, numbers)

    def _count(self, groups: _Groups, which: NDArray[np.bool_], by: int) -> None:
        """Count those of `which` in the group at their place, as gained or left (`by` 1, -1)."""
        found = {0: int(np.count_nonzero(which))} if groups is None else Counter(groups[which].tolist())
        for group, count in found.items():
            self._cached[group] = self._cached.get(group, 0) + by * count
            if by < 0:
                self._removed[group] = self._removed.get(group, 0) + count

    def _one_by_one(self, groups: _Groups, numbers: NDArray[np.int64]) -> None:
        keys_of, counts, removed = self._keys, self._cached, self._removed
        for group, block in zip(
            repeat(0) if groups is None else groups.tolist(), numbers.tolist(), strict=False
        ):
            if block >= 0:
                keys = int(keys_of[block])
                keys_of[block] = keys + 1
                if not keys:
                    counts[group] = counts.get(group, 0) + 1
                continue
            keys = int(keys_of[~block])
            keys_of[~block] = max(keys - 1, 0)
            if keys > 1:
                continue
            counts[group] = counts.get(group, 0) - 1
            removed[group] = removed.get(group, 0) + 1
            if self._unfilled:
                self._leave_room(group, ~block, 0)

    def fill(self, group: int, block: int, room: int) -> None:
        """A key of this block leaves out its last `room` tokens; an earlier key of it leaves out fewer."""
        self.settle()
        if block < self._keys.size and self._keys[block] == 1:
            self.reported = None
            self._leave_room(group, block, room)

    def _leave_room(self, group: int, block: int, room: int) -> None:
        short, before = self._short.setdefault(group, Counter()), self._unfilled.pop(block, 0)
        if before:
            short[before] -= 1
        if room:
            short[room] += 1
            self._unfilled[block] = room

    def reset(self) -> None:
        """All blocks left the map."""
        self.settle()
        self.reported = None
        for group, cached in self._cached.items():
            self._removed[group] = self._removed.get(group, 0) + cached
        self._keys[:] = 0
        for counted in (self._unfilled, self._cached, self._short):
            counted.clear()

    def _counts(self, group: int) -> BlockCounts:
        short = self._short.get(group)
        room = tuple(sorted((+short).items())) if short else ()
        return BlockCounts(self._cached.get(group, 0), self._removed.get(group, 0), room)

    def all_counts(self, groups: int) -> tuple[BlockCounts, ...]:
        """Of the first `groups` groups, of which the pool has no more: the same object until one changes."""
        self.settle()
        known = self.reported
        return known if known is not None and len(known) == groups else self._report(groups)

    def _report(self, groups: int) -> tuple[BlockCounts, ...]:
        if groups == 1:  # to read the group of each key of a long prompt takes a tenth of a ms
            self.keys = None
        self.reported = tuple([self._counts(group) for group in range(groups)])
        return self.reported


def count_of(held: Any) -> MapCount:
    """The count of a map; what the map holds when it is first asked for is counted one by one."""
    found: MapCount | None = vars(held).get(COUNT)
    if found is None:
        found = _scanned(held, MapCount())
        setattr(held, COUNT, found)
    return found


def _scanned(held: Any, count: MapCount) -> MapCount:
    for key, blocks in held._cache.items():
        for block in blocks if isinstance(blocks, dict) else (blocks.block_id,):
            count.note(key, block)
    count.settle()
    return count


def instrument_map(patches: MethodPatches, held: Any, count: MapCount | None = None) -> None:
    """Count what one map takes and drops, and what follows it in its pool."""
    patches.set(held, COUNT, _scanned(held, MapCount(patches) if count is None else count))
    patches.set(held, FAULTS_ATTRIBUTE, set())
    patches.wrap_own(held, "insert", _around_insert)
    patches.wrap_own(held, "pop", _around_pop)


def instrument_map_class(patches: MethodPatches) -> None:
    """Count what every map of this process takes and drops."""
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    patches.wrap(BlockHashToBlockMap, "insert", _around_insert)
    patches.wrap(BlockHashToBlockMap, "pop", _around_pop)


def send_counts(scheduler: Any, output: Any) -> None:
    """Let the counts of a scheduler's block pool travel with an output to every worker."""
    manager = scheduler.kv_cache_manager
    held = manager.block_pool.cached_block_hash_to_block
    count = held.__dict__.get(COUNT) or count_of(held)
    groups = len(manager.kv_cache_config.kv_cache_groups)
    many = len(count.changes) >= _MANY_CHANGES
    found = count.later_counts(groups, scheduler) if many else count.all_counts(groups)
    output.__dict__[COUNTS_ATTRIBUTE] = found


def carry_over(before: Any, now: Any) -> None:
    """A pool was reset, and may have a new map: what left the old one stays counted."""
    count = count_of(before)
    count.reset()
    if count.patches is None:
        setattr(now, COUNT, count)
    elif now is not before:
        instrument_map(count.patches, now, count)


@cache
def _group_reader() -> Callable[[Any], int]:
    from vllm.v1.core.kv_cache_utils import get_group_id

    reader: Callable[[Any], int] = get_group_id
    return reader


def _around_insert(original: Callable[..., Any]) -> Callable[..., Any]:
    def insert(held: Any, key: Any, block: Any) -> Any:
        try:  # as COUNT says: of a prompt this is called hundreds of times
            count = held._kv_canary_count
        except AttributeError:
            count = _first_count(held)
        result = original(held, key, block)
        try:
            count.changes.append(block.block_id)
            if (keys := count.keys) is not None:
                keys.append(key)
        except Exception as error:  # noqa: BLE001 - vLLM must go on; the next sweep's count differs
            log_fault(held, "counting a block that is cached", error)
        return result

    return insert


def _around_pop(original: Callable[..., Any]) -> Callable[..., Any]:
    def pop(held: Any, key: Any, block_id: int) -> Any:
        try:
            count = held._kv_canary_count
        except AttributeError:
            count = _first_count(held)
        block = original(held, key, block_id)
        if block is not None:
            try:
                (changes := count.changes).append(~block_id)
                if (keys := count.keys) is not None:
                    keys.append(key)
                if len(changes) >= _MOST_CHANGES:  # of a pool whose scheduler sends no counts
                    count.settle()
            except Exception as error:  # noqa: BLE001 - as above
                log_fault(held, "counting a block that is evicted", error)
        return block

    return pop


def _first_count(held: Any) -> MapCount | None:
    try:
        return count_of(held)
    except Exception as error:  # noqa: BLE001 - as above
        log_fault(held, "counting cached blocks", error)
        return None
