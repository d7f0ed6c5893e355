"""Counts the blocks in vLLM's map of cached blocks, apart from the events that workers follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from canary_obs.engines.toolkit.method_patches import MethodPatches

_Make = Callable[[Callable[..., Any]], Callable[..., Any]]
COUNTS_ATTRIBUTE = "kv_canary_cached_counts"  # of SchedulerOutput: BlockCounts by vLLM's group number
_COUNT = "_kv_canary_count"  # of BlockHashToBlockMap: its MapCount


class BlockCounts(NamedTuple):
    """Blocks of one group."""

    cached: int  # in the map now
    removed: int  # left the map since it was first counted
    unfilled: int  # tokens that cached blocks have room for, beyond those that they are cached with


class MapCount:
    """The blocks of one map. A block belongs to one group and may have several keys."""

    def __init__(self, patches: MethodPatches | None = None) -> None:
        """`patches` wrap one map's methods; None = those of the class are wrapped."""
        self.patches = patches
        self._keys: Counter[int] = Counter()  # by block
        self._unfilled: dict[int, int] = {}  # by block, where its only key stands for a part of it
        self._cached: Counter[int] = Counter()  # by group, as are those below
        self._removed: Counter[int] = Counter()
        self._short: Counter[int] = Counter()

    def insert(self, group: int, block: int) -> None:
        """The map has taken a new key of a block."""
        self._keys[block] += 1
        if self._keys[block] == 1:
            self._cached[group] += 1

    def remove(self, group: int, block: int) -> None:
        """The map has dropped a key of a block."""
        self._keys[block] -= 1
        if self._keys[block] <= 0:
            del self._keys[block]
            self._cached[group] -= 1
            self._removed[group] += 1
            self._short[group] -= self._unfilled.pop(block, 0)

    def fill(self, group: int, block: int, room: int) -> None:
        """A key of this block leaves out its last `room` tokens; an earlier key of it leaves out fewer."""
        if self._keys[block] == 1:
            self._short[group] += room - self._unfilled.get(block, 0)
            self._unfilled[block] = room

    def reset(self) -> None:
        """All blocks left the map."""
        self._removed.update(self._cached)
        for counted in (self._keys, self._unfilled, self._cached, self._short):
            counted.clear()

    def counts(self, group: int) -> BlockCounts:
        """Of one of vLLM's groups."""
        return BlockCounts(self._cached[group], self._removed[group], self._short[group])


def count_of(held: Any) -> MapCount:
    """The count of a map; what the map holds when it is first asked for is counted one by one."""
    found: MapCount | None = vars(held).get(_COUNT)
    if found is None:
        found = _scanned(held, MapCount())
        setattr(held, _COUNT, found)
    return found


def _scanned(held: Any, count: MapCount) -> MapCount:
    for key, blocks in held._cache.items():
        for block in blocks if isinstance(blocks, dict) else (blocks.block_id,):
            count.insert(_group_of(key), block)
    return count


def instrument_map(patches: MethodPatches, held: Any, count: MapCount | None = None) -> None:
    """Count what one map takes and drops, and what follows it in its pool."""
    patches.set(held, _COUNT, _scanned(held, MapCount(patches) if count is None else count))
    for name, make in (("insert", _around_insert), ("pop", _around_pop)):
        patches.wrap(held, name, partial(_bound, held, make))


def _bound(held: Any, make: _Make, original: Callable[..., Any]) -> Callable[..., Any]:
    return partial(make(lambda _, *given: original(*given)), held)


def instrument_map_class(patches: MethodPatches) -> None:
    """Count what every map of this process takes and drops."""
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    patches.wrap(BlockHashToBlockMap, "insert", _around_insert)
    patches.wrap(BlockHashToBlockMap, "pop", _around_pop)


def send_counts(manager: Any, output: Any) -> None:
    """Let the counts of a KVCacheManager's pool travel with a scheduler output to every worker."""
    count = count_of(manager.block_pool.cached_block_hash_to_block)
    groups = range(len(manager.kv_cache_config.kv_cache_groups))
    setattr(output, COUNTS_ATTRIBUTE, tuple([count.counts(group) for group in groups]))


def carry_over(before: Any, now: Any) -> None:
    """A pool was reset, and may have a new map: what left the old one stays counted."""
    count = count_of(before)
    count.reset()
    if count.patches is None:
        setattr(now, _COUNT, count)
    elif now is not before:
        instrument_map(count.patches, now, count)


def _group_of(key: bytes) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return int(get_group_id(key))


def _around_insert(original: Callable[..., Any]) -> Callable[..., Any]:
    def insert(held: Any, key: Any, block: Any) -> Any:
        count = count_of(held)
        result = original(held, key, block)
        count.insert(_group_of(key), block.block_id)
        return result

    return insert


def _around_pop(original: Callable[..., Any]) -> Callable[..., Any]:
    def pop(held: Any, key: Any, block_id: int) -> Any:
        count = count_of(held)
        block = original(held, key, block_id)
        if block is not None:
            count.remove(_group_of(key), block_id)
        return block

    return pop
