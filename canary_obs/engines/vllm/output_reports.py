"""Attaches to each scheduler output what the workers have to know, most of which is as it was before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from canary_obs.engines.vllm.admissions import ADMITTED
from canary_obs.engines.vllm.cache_count import COUNT, COUNTS_ATTRIBUTE, send_counts
from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE, number_output
from canary_obs.engines.vllm.heal_scheduler import HEALER_ATTRIBUTE, send_heals
from canary_obs.engines.vllm.offload_keys import send_keys
from canary_obs.engines.vllm.pending_events import EVENTS_ATTRIBUTE, PENDING, send_events
from canary_obs.engines.vllm.prefix_hits import HITS_ATTRIBUTE, TOKENS, UNCHANGED, send_hits
from canary_obs.engines.vllm.scheduler_reports import SECONDS_ATTRIBUTE, log_fault
from canary_obs.engines.vllm.token_chains import send_tokens
from canary_obs.engines.vllm.trace_headers import send_traces

Report = Callable[[Any, Any], None]  # of a scheduler and an output
# In this order: counts are of the map as it is after the events.
REPORTS: tuple[Report, ...] = (
    send_events, number_output, send_counts, send_hits, send_keys, send_tokens, send_traces, send_heals,
)  # fmt: skip


def around_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Scheduler.schedule`."""

    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        attach_reports(scheduler, output)
        return output

    return schedule


def attach_reports(scheduler: Any, output: Any) -> None:
    """Call each report that is due. What one of them fails to attach is missing, and the workers notice."""
    started = time.perf_counter()
    try:
        due: Sequence[Report] = due_reports(scheduler, output)
    except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
        log_fault(scheduler, "due_reports", error)
        due = REPORTS
    for report in due:
        try:
            report(scheduler, output)
        except Exception as error:  # noqa: BLE001 - as above
            log_fault(scheduler, report.__name__, error)
    held = scheduler.__dict__  # not by `vars` and `setattr`: every step pays for each call
    spent = held.get(SECONDS_ATTRIBUTE, 0.0) + time.perf_counter() - started
    held[SECONDS_ATTRIBUTE] = output.__dict__[SECONDS_ATTRIBUTE] = spent


def due_reports(scheduler: Any, output: Any) -> list[Report]:
    """Attach what has not changed, and return the reports that may have something new, in their order.

    Of a decode that goes on it is the number and the tokens alone: a call of each report, to learn that it
    has nothing, would be most of what the scheduler pays in a step.
    """
    manager, sent = scheduler.kv_cache_manager, output.__dict__
    held, pool, due = scheduler.__dict__, manager.block_pool, list[Report]()
    if pool.__dict__.get(PENDING) or ADMITTED in manager.coordinator.__dict__:
        due.append(send_events)
    else:
        sent[EVENTS_ATTRIBUTE] = ()
    count = pool.cached_block_hash_to_block.__dict__.get(COUNT)
    if count is None or count.changes or count.reported is None or due:
        due.append(send_counts)
    else:
        sent[COUNTS_ATTRIBUTE] = count.reported
    noted = manager.__dict__
    unchanged = noted.get(UNCHANGED)
    if unchanged is None or due or noted.get(TOKENS):
        due.append(send_hits)
    else:
        sent[HITS_ATTRIBUTE] = unchanged
    if scheduler.connector is not None:
        due.append(send_keys)
    due.append(send_tokens)
    if output.scheduled_new_reqs:
        due.append(send_traces)
    if held.get(HEALER_ATTRIBUTE) is not None:
        due.append(send_heals)
    # As `number_output` does; last, so that nothing that fails comes after it.
    if output.total_num_scheduled_tokens:
        held[FORWARDS_ATTRIBUTE] = sent[FORWARDS_ATTRIBUTE] = held.get(FORWARDS_ATTRIBUTE, 0) + 1
    return due
