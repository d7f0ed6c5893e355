"""Reports to the workers which blocks the scheduler's pool caches and evicts, on the scheduler's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.admissions import around_new_computed_blocks
from canary_obs.engines.vllm.cache_count import carry_over, count_of, instrument_map, instrument_map_class
from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE
from canary_obs.engines.vllm.heal_scheduler import heal_all, heal_one
from canary_obs.engines.vllm.offload_keys import follow_new_schedulers, instrument_connector
from canary_obs.engines.vllm.output_reports import around_schedule
from canary_obs.engines.vllm.pending_events import ADMIT, PENDING, lost, record, record_safely
from canary_obs.engines.vllm.pool_events import Partial, Published, PublishedRun
from canary_obs.engines.vllm.prefix_hits import TOKENS, TOTALS, UNCHANGED
from canary_obs.engines.vllm.scheduler_reports import FAULTS_ATTRIBUTE, SECONDS_ATTRIBUTE
from canary_obs.engines.vllm.token_chains import CHAINS_ATTRIBUTE, TokenChains


def instrument_scheduler_classes(patches: MethodPatches) -> None:
    """Wrap the methods of vLLM's classes: every scheduler of this process reports."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.sched.scheduler import Scheduler

    for name, make in _POOL_WRAPPERS.items():
        patches.wrap(BlockPool, name, make)
    instrument_map_class(patches)
    patches.wrap(KVCacheCoordinator, ADMIT, around_new_computed_blocks)
    patches.wrap(Scheduler, "schedule", around_schedule)
    heal_all(patches, Scheduler)
    patches.wrap(Scheduler, "__init__", partial(follow_new_schedulers, patches))


def instrument_scheduler(patches: MethodPatches, scheduler: Any) -> None:
    """Wrap the methods of one scheduler and what it owns."""
    manager = scheduler.kv_cache_manager
    patches.set(manager.block_pool, PENDING, [])
    patches.set(scheduler, FORWARDS_ATTRIBUTE, 0)
    patches.set(manager, TOKENS, {})
    patches.set(manager, TOTALS, [0] * len(manager.kv_cache_config.kv_cache_groups))
    patches.set(manager, UNCHANGED, None)
    patches.set(scheduler, CHAINS_ATTRIBUTE, TokenChains())
    patches.set(scheduler, SECONDS_ATTRIBUTE, 0.0)
    for owner in (scheduler, manager.block_pool):
        patches.set(owner, FAULTS_ATTRIBUTE, set())
    instrument_map(patches, manager.block_pool.cached_block_hash_to_block)
    instrument_connector(patches, scheduler)
    for name, make in _POOL_WRAPPERS.items():
        patches.wrap_own(manager.block_pool, name, make)
    patches.wrap_own(manager.coordinator, ADMIT, around_new_computed_blocks)
    patches.wrap_own(scheduler, "schedule", around_schedule)
    heal_one(patches, scheduler)


_Make = Callable[[Callable[..., Any]], Callable[..., Any]]
_HASH = attrgetter("block_hash")


def _around_cache_full_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def cache_full_blocks(
        pool: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int,
        block_size: int, kv_cache_group_id: int, *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        result = original(
            pool, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
            *rest, **kwargs,
        )  # fmt: skip

        try:  # not by `record_safely`: of many requests that decode, some fill a block in each step
            for start, stop in _cached_runs(blocks, num_cached_blocks, num_full_blocks):
                before = blocks[start - 1] if start else None
                previous = -1 if before is None or before.is_null else before.block_id
                group, rest = kv_cache_group_id, (start, previous, block_size)
                ids = tuple([block.block_id for block in blocks[start:stop]])
                record(pool, PublishedRun(group, ids, *rest) if ids[1:] else Published(group, ids[0], *rest))
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
            lost(pool, "cache_full_blocks", error)
        return result

    return cache_full_blocks


def _cached_runs(blocks: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of blocks that have a hash; null blocks of a window have none."""
    if start < stop and None not in map(_HASH, blocks[start:stop]):
        yield start, stop
        return
    first = start
    for index in range(start, stop):
        if blocks[index].is_null or blocks[index].block_hash is None:
            if first < index:
                yield first, index
            first = index + 1
    if first < stop:
        yield first, stop


def _around_cache_partial_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def cache_partial_block(
        pool: Any, request: Any, block: Any, num_tokens: int, kv_cache_group_id: int,
        block_size: int, *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        key = original(pool, request, block, num_tokens, kv_cache_group_id, block_size, *rest, **kwargs)

        def note() -> None:
            index = (num_tokens - 1) // block_size
            filled = num_tokens - index * block_size
            record(pool, Partial(kv_cache_group_id, block.block_id, index, filled))
            count = count_of(pool.cached_block_hash_to_block)
            count.fill(kv_cache_group_id, block.block_id, block_size - filled)

        if key is not None:
            record_safely(pool, "cache_partial_block", note)
        return key

    return cache_partial_block


def _around_move_block_hashes(original: Callable[..., Any]) -> Callable[..., Any]:
    def move_block_hashes(pool: Any, src_block: Any, dst_block: Any) -> Any:
        found: list[Published | Partial | None] = []
        record_safely(
            pool, "move_block_hashes", lambda: found.append(_last_publication(pool, src_block.block_id))
        )
        result = original(pool, src_block, dst_block)
        if found and (known := found[0]) is not None:
            record_safely(
                pool, "move_block_hashes", lambda: record(pool, known._replace(block=dst_block.block_id))
            )
        return result

    return move_block_hashes


def _last_publication(pool: Any, block: int) -> Published | Partial | None:
    # Older events were sent already; the moved block is then checked by the patrol, but not by sweeps.
    for event in reversed(vars(pool).get(PENDING, ())):
        if isinstance(event, Published | Partial) and event.block == block:
            return event
        if isinstance(event, PublishedRun) and block in event.blocks:
            return event.single(event.blocks.index(block))
    return None


def _around_remove_hashes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _remove_cached_block_hashes(pool: Any, block: Any) -> Any:
        hashes = original(pool, block)
        if hashes:
            try:  # not by `record_safely`, nor `record`: a long prompt displaces hundreds of blocks
                # No more than were published, which are counted.
                pool._kv_canary_pending.append(block.block_id)
            except AttributeError:  # as PENDING says; nothing is pending yet
                record_safely(pool, "_remove_cached_block_hashes", lambda: record(pool, block.block_id))
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
                lost(pool, "_remove_cached_block_hashes", error)
        return hashes

    return _remove_cached_block_hashes


def _around_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(pool: Any) -> Any:
        held = getattr(pool, "cached_block_hash_to_block", None)
        done = original(pool)

        def note() -> None:
            record(pool, None)
            carry_over(held, pool.cached_block_hash_to_block)

        if done:
            record_safely(pool, "reset_prefix_cache", note)
        return done

    return reset_prefix_cache


_POOL_WRAPPERS: dict[str, _Make] = {
    "cache_full_blocks": _around_cache_full_blocks,
    "cache_partial_block": _around_cache_partial_block,
    "move_block_hashes": _around_move_block_hashes,
    "_remove_cached_block_hashes": _around_remove_hashes,
    "reset_prefix_cache": _around_reset,
}
