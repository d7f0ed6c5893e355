"""What the scheduler's block pool has done since the last output: recorded here, and sent with the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from struct import pack
from typing import Any

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.admissions import ADMITTED, take_admitted
from canary_obs.engines.vllm.context_parallel import block_tokens
from canary_obs.engines.vllm.pool_events import BlockEvent, EventsLost, Loaded, LoadTokens
from canary_obs.engines.vllm.prefix_hits import note_hit
from canary_obs.engines.vllm.scheduler_reports import log_fault
from canary_obs.engines.vllm.token_chains import chains_of

log = logging.getLogger("canary_obs")
EVENTS_ATTRIBUTE = "kv_canary_block_events"  # of SchedulerOutput; sent with it to every worker
PENDING = "_kv_canary_pending"  # of BlockPool: events since the last `schedule`
ADMIT = "allocate_new_computed_blocks"
_MAX_PENDING = 1 << 20  # bounds the memory of a pool whose scheduler is not instrumented


def record_safely(pool: Any, what: str, act: Callable[[], None]) -> None:
    """Record events. If that fails, the workers forget what is cached, and their next sweep says so."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
        lost(pool, what, error)


def lost(pool: Any, what: str, error: Exception) -> None:
    """Events could not be recorded: the workers forget what is cached."""
    log_fault(pool, what, error)
    vars(pool).setdefault(PENDING, []).append(EventsLost(1))


def record(pool: Any, event: BlockEvent) -> None:
    """The pool has changed; it travels with the next output."""
    pending = pool.__dict__.setdefault(PENDING, [])
    if len(pending) >= _MAX_PENDING:
        dropped = sum(event.events if isinstance(event, EventsLost) else 1 for event in pending)
        pending[:] = [EventsLost(dropped)]
        log.warning(
            "canary_obs: vLLM's block pool changed %d times without a call of Scheduler.schedule, the limit "
            "is %d: its prefix cache is not swept until it is reset; use vLLM's own scheduler class",
            dropped, _MAX_PENDING,
        )  # fmt: skip
    pending.append(event)


def _record_admitted(scheduler: Any, manager: Any) -> None:
    for request, hit, start, stop in take_admitted(manager.coordinator):
        if hit:
            note_hit(manager, request, hit)
        if start < stop:
            _record_loads(scheduler, scheduler.requests[request], start, stop)


def _record_loads(scheduler: Any, request: Any, start: int, stop: int) -> None:
    name, manager = request.request_id, scheduler.kv_cache_manager
    if request.prompt_embeds is None:  # else its prompt has no tokens
        tokens = Later(partial(_first_tokens, scheduler, request, stop))
        record(manager.block_pool, LoadTokens(name, tokens))
        chains_of(scheduler).expect(name, tokens)
    for number, blocks in enumerate(manager.get_block_ids(name)):
        size = block_tokens(manager, number)
        first = start // size
        ids = tuple(blocks[first : -(-stop // size)])
        if any(ids):
            record(manager.block_pool, Loaded(number, ids, first, start, stop, name))


def _first_tokens(scheduler: Any, request: Any, stop: int) -> bytes | None:
    """int32; what is asked for later is the same, as a request's tokens only become more."""
    try:
        ids = request.all_token_ids[:stop]
        return pack(f"{len(ids)}i", *ids)  # in half the time that numpy takes
    except Exception as error:  # noqa: BLE001 - nobody knows what its blocks are to hold
        log_fault(scheduler, "first_tokens", error)
        return None


def send_events(scheduler: Any, output: Any) -> None:
    """Let the pool's events since the last output travel with this one to every worker."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if ADMITTED in manager.coordinator.__dict__:  # not when it is admitted: its blocks may still change
        record_safely(pool, ADMIT, lambda: _record_admitted(scheduler, manager))
    pending = pool.__dict__.get(PENDING, ())
    output.__dict__[EVENTS_ATTRIBUTE] = tuple(pending)
    if pending:
        pending.clear()
