"""Counts the blocks in vLLM's map of cached blocks, apart from the events that workers follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.scheduler_reports import FAULTS_ATTRIBUTE, log_fault

_Make = Callable[[Callable[..., Any]], Callable[..., Any]]
# Of SchedulerOutput: BlockCounts by vLLM's group number, or Later of them, in the process that made it.
COUNTS_ATTRIBUTE = "kv_canary_cached_counts"
COUNT = "_kv_canary_count"  # of BlockHashToBlockMap: its MapCount
_MOST_CHANGES = 1 << 12  # that are counted together
_MANY_CHANGES = 32  # with fewer, a call of NumPy takes longer than they do
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
        self._unfilled: dict[int, int] = {}  # by block, where its only key stands for a part of it
        self._cached: dict[int, int] = {}  # by group, as are those below
        self._removed: dict[int, int] = {}
        self._short: dict[int, Counter[int]] = {}  # blocks, by the room that they have
        self._groups: int | None = None  # of the pool, which `all_counts` is given; None = not yet
        # What `all_counts` has returned last; None = something has changed since, as do `changes`.
        self.reported: tuple[BlockCounts, ...] | None = None
        # Keys that the map has gained, with their blocks, or dropped, with ~block: in order, not counted yet.
        # The wrappers of its methods add to it themselves: a long prompt displaces hundreds of blocks.
        self.changes: list[tuple[Any, int]] = []
        self._later: Later[tuple[BlockCounts, ...]] | None = None  # of changes before those

    def later_counts(self, groups: int, scheduler: Any) -> Later[tuple[BlockCounts, ...]]:
        """`all_counts` as of now, computed when it is asked for; None = that failed, which was logged."""

        def compute() -> tuple[BlockCounts, ...] | None:
            self._later, now, self.changes = None, self.changes, changes
            try:
                return self.all_counts(groups)
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler, or its worker, must go on
                log_fault(scheduler, send_counts.__name__, error)
                return None
            finally:
                self.changes = now

        if self._later is not None:
            self._later.get()
        changes, self.changes = self.changes, []
        self.reported = None  # not known yet
        self._later = Later(compute)
        return self._later

    def settle(self) -> None:
        """Count the changes so far: when somebody asks, or there are many."""
        if self._later is not None:
            self._later.get()
        if not self.changes:
            return
        changes, self.changes, self.reported = self.changes, [], None
        keys, blocks = zip(*changes, strict=True)
        # A pool of one group has no other in its keys: to read each of a long prompt's takes a tenth of a ms.
        groups = [0] * len(keys) if self._groups == 1 else list(map(_group_reader(), keys))
        highest = max(max(blocks), ~min(blocks))
        if highest >= self._keys.size:
            self._keys = np.concatenate((self._keys, np.zeros(highest + 1, dtype=np.int32)))
        if len(blocks) < _MANY_CHANGES or self._unfilled:
            self._one_by_one(groups, blocks)
            return
        # As a rule a prompt drops what it displaces, and then takes its own blocks.
        numbers = np.array(blocks, dtype=np.int64)
        first = int(np.count_nonzero(numbers < 0))
        dropped, added = ~numbers[:first], numbers[first:]
        if min(blocks[first:], default=0) < 0 or len({*blocks}) < len(blocks):
            self._one_by_one(groups, blocks)
            return
        left = self._keys[dropped]
        self._keys[dropped] = np.maximum(left - 1, 0)
        self._count(groups[:first], left <= 1, -1)
        before = self._keys[added]
        self._keys[added] = before + 1
        self._count(groups[first:], before == 0, 1)

    def _count(self, groups: Sequence[int], which: NDArray[np.bool_], by: int) -> None:
        """Count those of `which` in the group at their place, as gained or left (`by` 1, -1)."""
        for group, count in Counter(compress(groups, which.tolist())).items():
            self._cached[group] = self._cached.get(group, 0) + by * count
            if by < 0:
                self._removed[group] = self._removed.get(group, 0) + count

    def _one_by_one(self, groups: Sequence[int], blocks: Sequence[int]) -> None:
        keys_of, counts, removed = self._keys, self._cached, self._removed
        for group, block in zip(groups, blocks, strict=True):
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

    def counts(self, group: int) -> BlockCounts:
        """Of one of vLLM's groups."""
        self.settle()
        short = self._short.get(group)
        room = tuple(sorted((+short).items())) if short else ()
        return BlockCounts(self._cached.get(group, 0), self._removed.get(group, 0), room)

    def all_counts(self, groups: int) -> tuple[BlockCounts, ...]:
        """Of the first `groups` groups, of which the pool has no more: the same object until one changes."""
        self._groups = groups
        self.settle()
        if self.reported is None or len(self.reported) != groups:
            self.reported = tuple([self.counts(group) for group in range(groups)])
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
            count.changes.append((key, block))
    count.settle()
    return count


def instrument_map(patches: MethodPatches, held: Any, count: MapCount | None = None) -> None:
    """Count what one map takes and drops, and what follows it in its pool."""
    patches.set(held, COUNT, _scanned(held, MapCount(patches) if count is None else count))
    patches.set(held, FAULTS_ATTRIBUTE, set())
    for name, make in (("insert", _around_insert), ("pop", _around_pop)):
        patches.wrap(held, name, partial(_bound, held, make))


def _bound(held: Any, make: _Make, original: Callable[..., Any]) -> Callable[..., Any]:
    return partial(make(lambda _, *given: original(*given)), held)


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


# Both are spelled out: a long prompt displaces hundreds of blocks.


def _around_insert(original: Callable[..., Any]) -> Callable[..., Any]:
    def insert(held: Any, key: Any, block: Any) -> Any:
        try:
            count = held.__dict__.get(COUNT) or count_of(held)
        except Exception as error:  # noqa: BLE001 - vLLM must go on; the next sweep's count differs
            log_fault(held, "counting cached blocks", error)
            return original(held, key, block)
        result = original(held, key, block)
        try:
            (changes := count.changes).append((key, block.block_id))
            if len(changes) >= _MOST_CHANGES:  # what is dropped was added before
                count.settle()
        except Exception as error:  # noqa: BLE001 - as above
            log_fault(held, "counting a block that is cached", error)
        return result

    return insert


def _around_pop(original: Callable[..., Any]) -> Callable[..., Any]:
    def pop(held: Any, key: Any, block_id: int) -> Any:
        try:
            count = held.__dict__.get(COUNT) or count_of(held)
        except Exception as error:  # noqa: BLE001 - as above
            log_fault(held, "counting cached blocks", error)
            return original(held, key, block_id)
        block = original(held, key, block_id)
        if block is not None:
            try:
                count.changes.append((key, ~block_id))
            except Exception as error:  # noqa: BLE001 - as above
                log_fault(held, "counting a block that is evicted", error)
        return block

    return pop
