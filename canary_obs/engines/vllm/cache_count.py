"""Counts the blocks in vLLM's map of cached blocks, apart from the events that workers follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.scheduler_reports import FAULTS_ATTRIBUTE, log_fault

_Make = Callable[[Callable[..., Any]], Callable[..., Any]]
COUNTS_ATTRIBUTE = "kv_canary_cached_counts"  # of SchedulerOutput: BlockCounts by vLLM's group number
COUNT = "_kv_canary_count"  # of BlockHashToBlockMap: its MapCount
_MOST_NEW = 1 << 12  # keys that are counted together


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
        # Plain dicts: a long prompt displaces hundreds of blocks within one step.
        self._keys: dict[int, int] = {}  # by block
        self._unfilled: dict[int, int] = {}  # by block, where its only key stands for a part of it
        self._cached: dict[int, int] = {}  # by group, as are those below
        self._removed: dict[int, int] = {}
        self._short: dict[int, Counter[int]] = {}  # blocks, by the room that they have
        # What `all_counts` has returned last; None = something has changed since.
        self.reported: tuple[BlockCounts, ...] | None = None
        # Taken by the map, and not counted yet: a prompt that was loaded brings hundreds of blocks at once.
        self._new_keys: list[Any] = []
        self._new_blocks: list[int] = []

    def take(self, key: Any, block: int) -> None:
        """The map has taken a new key of a block; it is counted with the others, when somebody asks."""
        self.reported = None
        self._new_keys.append(key)
        self._new_blocks.append(block)
        if len(self._new_blocks) >= _MOST_NEW:
            self._settle()

    def _settle(self) -> None:
        if not self._new_blocks:
            return
        keys, self._new_keys = self._new_keys, []
        blocks, self._new_blocks = self._new_blocks, []
        groups, new = list(map(_group_reader(), keys)), dict.fromkeys(blocks, 1)
        if len(new) < len(blocks) or not self._keys.keys().isdisjoint(new):
            for group, block in zip(groups, blocks, strict=True):
                self.insert(group, block)
            return
        self._keys.update(new)
        for group, count in Counter(groups).items():
            self._cached[group] = self._cached.get(group, 0) + count

    def insert(self, group: int, block: int) -> None:
        """The map has taken a new key of a block, after all that it has taken before."""
        self.reported = None
        keys = self._keys.get(block, 0)
        self._keys[block] = keys + 1
        if not keys:
            self._cached[group] = self._cached.get(group, 0) + 1

    def remove(self, group: int, block: int) -> None:
        """The map has dropped a key of a block."""
        self._settle()
        self.reported = None
        keys = self._keys.pop(block, 0)
        if keys > 1:
            self._keys[block] = keys - 1
            return
        self._cached[group] = self._cached.get(group, 0) - 1
        self._removed[group] = self._removed.get(group, 0) + 1
        if self._unfilled:
            self._leave_room(group, block, 0)

    def fill(self, group: int, block: int, room: int) -> None:
        """A key of this block leaves out its last `room` tokens; an earlier key of it leaves out fewer."""
        self._settle()
        if self._keys.get(block) == 1:
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
        self._settle()
        self.reported = None
        for group, cached in self._cached.items():
            self._removed[group] = self._removed.get(group, 0) + cached
        for counted in (self._keys, self._unfilled, self._cached, self._short):
            counted.clear()

    def counts(self, group: int) -> BlockCounts:
        """Of one of vLLM's groups."""
        self._settle()
        short = self._short.get(group)
        room = tuple(sorted((+short).items())) if short else ()
        return BlockCounts(self._cached.get(group, 0), self._removed.get(group, 0), room)

    def all_counts(self, groups: int) -> tuple[BlockCounts, ...]:
        """Of the first `groups` groups: the same object until one of them changes."""
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
    group_of = _group_reader()
    for key, blocks in held._cache.items():
        for block in blocks if isinstance(blocks, dict) else (blocks.block_id,):
            count.insert(group_of(key), block)
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
    output.__dict__[COUNTS_ATTRIBUTE] = count.all_counts(len(manager.kv_cache_config.kv_cache_groups))


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
        try:  # spelled out: a long prompt displaces hundreds of blocks
            count = held.__dict__.get(COUNT) or count_of(held)
        except Exception as error:  # noqa: BLE001 - vLLM must go on; the next sweep's count differs
            log_fault(held, "counting cached blocks", error)
            return original(held, key, block)
        result = original(held, key, block)
        try:
            count.take(key, block.block_id)
        except Exception as error:  # noqa: BLE001 - as above
            log_fault(held, "counting a block that is cached", error)
        return result

    return insert


def _around_pop(original: Callable[..., Any]) -> Callable[..., Any]:
    group_of = _group_reader()

    def pop(held: Any, key: Any, block_id: int) -> Any:
        try:
            count = held.__dict__.get(COUNT) or count_of(held)
        except Exception as error:  # noqa: BLE001 - as above
            log_fault(held, "counting cached blocks", error)
            return original(held, key, block_id)
        block = original(held, key, block_id)
        if block is not None:
            try:
                count.remove(group_of(key), block_id)
            except Exception as error:  # noqa: BLE001 - as above
                log_fault(held, "counting a block that is evicted", error)
        return block

    return pop
