"""Reports to the workers which blocks the scheduler's pool caches and evicts, on the scheduler's output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from struct import pack
from typing import Any

import numpy as np

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.admissions import ADMITTED, around_new_computed_blocks, take_admitted
from canary_obs.engines.vllm.cache_count import (
    carry_over,
    count_of,
    instrument_map,
    instrument_map_class,
    send_counts,
)
from canary_obs.engines.vllm.context_parallel import block_tokens
from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE, number_output
from canary_obs.engines.vllm.heal_scheduler import heal_all, heal_one, send_heals
from canary_obs.engines.vllm.offload_keys import follow_new_schedulers, instrument_connector, send_keys
from canary_obs.engines.vllm.pool_events import (
    BlockEvent,
    EventsLost,
    Loaded,
    LoadTokens,
    Partial,
    Published,
    PublishedRun,
)
from canary_obs.engines.vllm.prefix_hits import TOKENS, TOTALS, UNCHANGED, note_hit, send_hits
from canary_obs.engines.vllm.scheduler_reports import (
    FAULTS_ATTRIBUTE,
    SECONDS_ATTRIBUTE,
    attach_reports,
    log_fault,
)
from canary_obs.engines.vllm.token_chains import (
    CHAINS_ATTRIBUTE,
    TokenChains,
    chains_of,
    send_tokens,
)
from canary_obs.engines.vllm.trace_headers import send_traces

log = logging.getLogger("canary_obs")
EVENTS_ATTRIBUTE = "kv_canary_block_events"  # of SchedulerOutput; sent with it to every worker
_PENDING = "_kv_canary_pending"  # of BlockPool: events since the last `schedule`
_ADMIT = "allocate_new_computed_blocks"
_MAX_PENDING = 1 << 20  # bounds the memory of a pool whose scheduler is not instrumented


def instrument_scheduler_classes(patches: MethodPatches) -> None:
    """Wrap the methods of vLLM's classes: every scheduler of this process reports."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.sched.scheduler import Scheduler

    for name, make in _POOL_WRAPPERS.items():
        patches.wrap(BlockPool, name, make)
    instrument_map_class(patches)
    patches.wrap(KVCacheCoordinator, _ADMIT, around_new_computed_blocks)
    patches.wrap(Scheduler, "schedule", _around_schedule)
    heal_all(patches, Scheduler)
    patches.wrap(Scheduler, "__init__", partial(follow_new_schedulers, patches))


def instrument_scheduler(patches: MethodPatches, scheduler: Any) -> None:
    """Wrap the methods of one scheduler and what it owns."""
    manager = scheduler.kv_cache_manager
    patches.set(manager.block_pool, _PENDING, [])
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
        patches.wrap(manager.block_pool, name, _bound(manager.block_pool, make))
    coordinator = manager.coordinator
    patches.wrap(coordinator, _ADMIT, _bound(coordinator, around_new_computed_blocks))
    patches.wrap(scheduler, "schedule", _bound(scheduler, _around_schedule))
    heal_one(patches, scheduler)


_Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def _bound(owner: Any, make: _Make) -> _Make:
    """The wrapper `make` of a class's method, for the bound method of `owner`."""

    def make_bound(original: Callable[..., Any]) -> Callable[..., Any]:
        def unbound(_: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return partial(make(unbound), owner)

    return make_bound


def _guarded(pool: Any, what: str, record: Callable[[], None]) -> None:
    """Record events. If that fails, the workers forget what is cached, and their next sweep says so."""
    try:
        record()
    except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
        _lost(pool, what, error)


def _lost(pool: Any, what: str, error: Exception) -> None:
    log_fault(pool, what, error)
    vars(pool).setdefault(_PENDING, []).append(EventsLost(1))


def _record(pool: Any, event: BlockEvent) -> None:
    pending = pool.__dict__.setdefault(_PENDING, [])
    if len(pending) >= _MAX_PENDING:
        lost = sum(event.events if isinstance(event, EventsLost) else 1 for event in pending)
        pending[:] = [EventsLost(lost)]
        log.warning(
            "canary_obs: vLLM's block pool changed %d times without a call of Scheduler.schedule, the limit "
            "is %d: its prefix cache is not swept until it is reset; use vLLM's own scheduler class",
            lost, _MAX_PENDING,
        )  # fmt: skip
    pending.append(event)


def _around_cache_full_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def cache_full_blocks(
        pool: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int,
        block_size: int, kv_cache_group_id: int, *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        result = original(
            pool, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
            *rest, **kwargs,
        )  # fmt: skip

        try:  # not by `_guarded`: of many requests that decode, some fill a block in each step
            for start, stop in _cached_runs(blocks, num_cached_blocks, num_full_blocks):
                before = blocks[start - 1] if start else None
                previous = -1 if before is None or before.is_null else before.block_id
                group, rest = kv_cache_group_id, (start, previous, block_size)
                ids = tuple([block.block_id for block in blocks[start:stop]])
                _record(pool, PublishedRun(group, ids, *rest) if ids[1:] else Published(group, ids[0], *rest))
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
            _lost(pool, "cache_full_blocks", error)
        return result

    return cache_full_blocks


def _cached_runs(blocks: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of blocks that have a hash; null blocks of a window have none."""
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

        def record() -> None:
            index = (num_tokens - 1) // block_size
            filled = num_tokens - index * block_size
            _record(pool, Partial(kv_cache_group_id, block.block_id, index, filled))
            count = count_of(pool.cached_block_hash_to_block)
            count.fill(kv_cache_group_id, block.block_id, block_size - filled)

        if key is not None:
            _guarded(pool, "cache_partial_block", record)
        return key

    return cache_partial_block


def _around_move_block_hashes(original: Callable[..., Any]) -> Callable[..., Any]:
    def move_block_hashes(pool: Any, src_block: Any, dst_block: Any) -> Any:
        found: list[Published | Partial | None] = []
        _guarded(pool, "move_block_hashes", lambda: found.append(_last_publication(pool, src_block.block_id)))
        result = original(pool, src_block, dst_block)
        if found and (known := found[0]) is not None:
            _guarded(
                pool, "move_block_hashes", lambda: _record(pool, known._replace(block=dst_block.block_id))
            )
        return result

    return move_block_hashes


def _last_publication(pool: Any, block: int) -> Published | Partial | None:
    # Older events were sent already; the moved block is then checked by the patrol, but not by sweeps.
    for event in reversed(vars(pool).get(_PENDING, ())):
        if isinstance(event, Published | Partial) and event.block == block:
            return event
        if isinstance(event, PublishedRun) and block in event.blocks:
            return event.single(event.blocks.index(block))
    return None


def _around_remove_hashes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _remove_cached_block_hashes(pool: Any, block: Any) -> Any:
        hashes = original(pool, block)
        if hashes:
            try:  # not by `_guarded`: a long prompt displaces hundreds of blocks
                _record(pool, block.block_id)
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
                _lost(pool, "_remove_cached_block_hashes", error)
        return hashes

    return _remove_cached_block_hashes


def _around_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(pool: Any) -> Any:
        held = getattr(pool, "cached_block_hash_to_block", None)
        done = original(pool)

        def record() -> None:
            _record(pool, None)
            carry_over(held, pool.cached_block_hash_to_block)

        if done:
            _guarded(pool, "reset_prefix_cache", record)
        return done

    return reset_prefix_cache


def _record_admitted(scheduler: Any, manager: Any) -> None:
    for request, hit, start, stop in take_admitted(manager.coordinator):
        if hit:
            note_hit(manager, request, hit)
        if start < stop:
            _record_loads(scheduler, scheduler.requests[request], start, stop)


def _record_loads(scheduler: Any, request: Any, start: int, stop: int) -> None:
    name, manager = request.request_id, scheduler.kv_cache_manager
    if request.prompt_embeds is None:  # else its prompt has no tokens
        ids = request.all_token_ids[:stop]
        tokens = pack(f"{len(ids)}i", *ids)  # in half the time that numpy takes
        _record(manager.block_pool, LoadTokens(name, tokens))
        chains_of(scheduler).expect(name, np.frombuffer(tokens, dtype=np.int32))
    for number, blocks in enumerate(manager.get_block_ids(name)):
        size = block_tokens(manager, number)
        first = start // size
        ids = tuple(blocks[first : -(-stop // size)])
        if any(ids):
            _record(manager.block_pool, Loaded(number, ids, first, start, stop, name))


def _around_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        attach_reports(scheduler, output, _REPORTS)
        return output

    return schedule


def send_events(scheduler: Any, output: Any) -> None:
    """Let the pool's events since the last output travel with this one to every worker."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if ADMITTED in manager.coordinator.__dict__:  # not when it is admitted: its blocks may still change
        _guarded(pool, _ADMIT, lambda: _record_admitted(scheduler, manager))
    pending = pool.__dict__.get(_PENDING, ())
    output.__dict__[EVENTS_ATTRIBUTE] = tuple(pending)
    if pending:
        pending.clear()


# In this order: counts are of the map as it is after the events. Each of them is called in every step, and
# first asks whether there is anything new.
_REPORTS = send_events, number_output, send_counts, send_hits, send_keys, send_tokens, send_traces, send_heals

_POOL_WRAPPERS: dict[str, _Make] = {
    "cache_full_blocks": _around_cache_full_blocks,
    "cache_partial_block": _around_cache_partial_block,
    "move_block_hashes": _around_move_block_hashes,
    "_remove_cached_block_hashes": _around_remove_hashes,
    "reset_prefix_cache": _around_reset,
}
