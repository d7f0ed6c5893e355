"""Reports which blocks the scheduler's pool caches and evicts to the workers, on the scheduler's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.cached_blocks import BlockEvent, Loaded, Published, PublishedRun

EVENTS_ATTRIBUTE = "kv_canary_block_events"  # attribute of SchedulerOutput; travels with it to every worker
_PENDING = "_kv_canary_pending"  # attribute of BlockPool
_LIMIT = 1 << 20  # a pool whose scheduler never asks must not grow without bound


def instrument_scheduler_classes(patches: MethodPatches) -> None:
    """Wrap the methods of vLLM's classes: every scheduler of this process reports."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    for name, make in _POOL_WRAPPERS.items():
        patches.wrap(BlockPool, name, make)
    patches.wrap(KVCacheManager, "allocate_slots", _allocated)
    patches.wrap(Scheduler, "schedule", _schedule)


def instrument_scheduler(patches: MethodPatches, scheduler: Any) -> None:
    """Wrap the methods of one scheduler and what it owns."""
    manager = scheduler.kv_cache_manager
    patches.set(manager.block_pool, _PENDING, [])
    for name, make in _POOL_WRAPPERS.items():
        patches.wrap(manager.block_pool, name, _bound(manager.block_pool, make))
    patches.wrap(manager, "allocate_slots", _bound(manager, _allocated))
    patches.wrap(scheduler, "schedule", _bound(scheduler, _schedule))


_Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def _bound(owner: Any, make: _Make) -> _Make:
    """The wrapper of a class's method as one of `owner`'s bound method."""

    def make_bound(original: Callable[..., Any]) -> Callable[..., Any]:
        def unbound(_: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return partial(make(unbound), owner)

    return make_bound


def _note(pool: Any, event: BlockEvent) -> None:
    pending = vars(pool).setdefault(_PENDING, [])
    if len(pending) < _LIMIT:
        pending.append(event)


def _full_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def cache_full_blocks(
        pool: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int,
        block_size: int, kv_cache_group_id: int, *rest: Any, **named: Any,
    ) -> Any:  # fmt: skip
        result = original(
            pool, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
            *rest, **named,
        )  # fmt: skip
        for start, stop in _findable(blocks, num_cached_blocks, num_full_blocks):
            before = blocks[start - 1] if start else None
            previous = -1 if before is None or before.is_null else before.block_id
            ids = tuple([block.block_id for block in blocks[start:stop]])
            run = PublishedRun(kv_cache_group_id, ids, start, previous, block_size)
            _note(pool, run if len(ids) > 1 else run.single(0))
        return result

    return cache_full_blocks


def _findable(blocks: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of blocks that have a hash, without the null blocks of a window."""
    first = start
    for index in range(start, stop):
        if blocks[index].is_null or blocks[index].block_hash is None:
            if first < index:
                yield first, index
            first = index + 1
    if first < stop:
        yield first, stop


def _partial_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def cache_partial_block(
        pool: Any, request: Any, block: Any, num_tokens: int, kv_cache_group_id: int,
        block_size: int, *rest: Any, **named: Any,
    ) -> Any:  # fmt: skip
        key = original(pool, request, block, num_tokens, kv_cache_group_id, block_size, *rest, **named)
        if key is not None:
            index = (num_tokens - 1) // block_size
            filled = num_tokens - index * block_size
            _note(pool, Published(kv_cache_group_id, block.block_id, index, -1, filled))
        return key

    return cache_partial_block


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    def move_block_hashes(pool: Any, src_block: Any, dst_block: Any) -> Any:
        known = _last_publication(pool, src_block.block_id)
        result = original(pool, src_block, dst_block)
        if known is not None:
            _note(pool, known._replace(block=dst_block.block_id))
        return result

    return move_block_hashes


def _last_publication(pool: Any, block: int) -> Published | None:
    # Older publications were carried away; the copy is then covered by the patrol, not by sweeps.
    for event in reversed(vars(pool).get(_PENDING, ())):
        if isinstance(event, Published) and event.block == block:
            return event
        if isinstance(event, PublishedRun) and block in event.blocks:
            return event.single(event.blocks.index(block))
    return None


def _removed(original: Callable[..., Any]) -> Callable[..., Any]:
    def _remove_cached_block_hashes(pool: Any, block: Any) -> Any:
        hashes = original(pool, block)
        if hashes:
            _note(pool, block.block_id)
        return hashes

    return _remove_cached_block_hashes


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(pool: Any) -> Any:
        done = original(pool)
        if done:
            _note(pool, None)
        return done

    return reset_prefix_cache


def _allocated(original: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_slots(
        manager: Any, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0,
        *rest: Any, num_external_computed_tokens: int = 0, **named: Any,
    ) -> Any:  # fmt: skip
        start = request.num_computed_tokens + num_new_computed_tokens
        blocks = original(
            manager, request, num_new_tokens, num_new_computed_tokens, *rest,
            num_external_computed_tokens=num_external_computed_tokens, **named,
        )  # fmt: skip
        if blocks is not None and num_external_computed_tokens:
            _note_loads(manager, request.request_id, start, start + num_external_computed_tokens)
        return blocks

    return allocate_slots


def _note_loads(manager: Any, request: str, start: int, stop: int) -> None:
    groups = zip(manager.kv_cache_config.kv_cache_groups, manager.get_block_ids(request), strict=True)
    for number, (group, blocks) in enumerate(groups):
        size = group.kv_cache_spec.block_size
        for order in range(start // size, min(len(blocks), -(-stop // size))):
            if blocks[order]:  # 0 is the null block: out of a window, never loaded
                first, last = max(start - order * size, 0), min(stop - order * size, size)
                _note(manager.block_pool, Loaded(number, blocks[order], first, last))


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        pending = vars(scheduler.kv_cache_manager.block_pool).setdefault(_PENDING, [])
        setattr(output, EVENTS_ATTRIBUTE, tuple(pending))
        pending.clear()
        return output

    return schedule


_POOL_WRAPPERS: dict[str, _Make] = {
    "cache_full_blocks": _full_blocks,
    "cache_partial_block": _partial_block,
    "move_block_hashes": _moved,
    "_remove_cached_block_hashes": _removed,
    "reset_prefix_cache": _reset,
}
