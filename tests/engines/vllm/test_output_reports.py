"""What is attached to a scheduler output at once is what its reports would attach; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm import cache_count, heal_scheduler, output_reports, pending_events
from canary_obs.engines.vllm.admissions import ADMITTED, Admitted
from canary_obs.engines.vllm.cache_count import COUNT, MapCount
from canary_obs.engines.vllm.scheduler_reports import SECONDS_ATTRIBUTE
from canary_obs.engines.vllm.token_chains import CHAINS_ATTRIBUTE, TokenChains

BLOCKS = "publish", "evict", "fill", "events alone"
REQUESTS = "hit", "admit", "start", "finish"
ACTS = *BLOCKS, *REQUESTS, "nothing", "idle", "heal"


def made() -> Any:
    """A scheduler with one group of blocks, as far as the reports look at it."""
    held = SimpleNamespace(**{COUNT: MapCount()})
    groups = SimpleNamespace(kv_cache_groups=[None])
    coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=4)])
    manager = SimpleNamespace(
        block_pool=SimpleNamespace(cached_block_hash_to_block=held), coordinator=coordinator,
        kv_cache_config=groups,
    )  # fmt: skip
    return SimpleNamespace(
        kv_cache_manager=manager, connector=None, requests={}, **{CHAINS_ATTRIBUTE: TokenChains()}
    )


def _cached(count: MapCount) -> bool:
    count.settle()
    return bool(count._keys.any())


def act(scheduler: Any, name: str, number: int) -> Any:
    """Do it, and make the scheduler's next output."""
    manager = scheduler.kv_cache_manager
    pool, new, finished = manager.block_pool, [], set()
    count: MapCount = pool.cached_block_hash_to_block.__dict__[COUNT]
    block = number % 5 + 1
    if name == "publish":
        count.note(0, block)
    elif name == "evict" and _cached(count):
        count.note(0, ~int(count._keys.argmax()))
        pending_events.record(pool, block)
    elif name == "fill":
        count.fill(0, block, 1)
    elif name == "events alone":
        pending_events.record(pool, block)
    if name in {"hit", "admit"}:  # a request that is admitted may be scheduled by a later output
        own = f"r{number + (name == 'admit')}"
        vars(manager.coordinator).setdefault(ADMITTED, []).append(Admitted(own, 4, 4, 4))
    if name in {"hit", "start"}:
        new = [SimpleNamespace(req_id=f"r{number}", num_computed_tokens=4, block_ids=([block],))]
        headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        scheduler.requests[f"r{number}"] = SimpleNamespace(trace_headers=headers)
    if name == "finish":
        finished = {f"r{number - 1}"}
    elif name == "heal":
        healer = SimpleNamespace(report=lambda output: setattr(output, "healed", number))
        setattr(scheduler, heal_scheduler.HEALER_ATTRIBUTE, healer)
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
    tokens = 0 if name == "idle" else 1
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, scheduled_new_reqs=new, num_scheduled_tokens={},
        scheduled_cached_reqs=cached, finished_req_ids=finished, kv_cache_block_copies=(),
    )  # fmt: skip


def attached(output: Any) -> dict[str, Any]:
    """What was attached to it, without the time that it took, and without arrays."""
    own = {name: value for name, value in vars(output).items() if name.startswith(("kv_canary", "healed"))}
    own.pop(SECONDS_ATTRIBUTE, None)
    tokens = own["kv_canary_tokens"]
    return own | {"kv_canary_tokens": (tokens.get() if isinstance(tokens, Later) else tokens).tolist()}


@given(st.lists(st.sampled_from(ACTS), max_size=20))
def test_the_same_is_attached_as_by_all_reports(acts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_count, "_group_reader", lambda: lambda key: key)
        due, every = made(), made()
        for number, name in enumerate(acts):
            output, wanted = act(due, name, number), act(every, name, number)
            output_reports.attach_reports(due, output)
            for report in output_reports.REPORTS:
                report(every, wanted)
            assert attached(output) == attached(wanted)


def test_a_decode_that_goes_on_has_one_report() -> None:
    scheduler = made()
    output_reports.attach_reports(scheduler, act(scheduler, "nothing", 0))
    assert output_reports.due_reports(scheduler, act(scheduler, "nothing", 1)) == [output_reports.send_tokens]


def test_what_cannot_be_asked_is_reported_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_count, "_group_reader", lambda: lambda key: key)
    scheduler = made()
    del scheduler.connector
    for number in range(2):
        output = act(scheduler, "publish", number)
        output_reports.attach_reports(scheduler, output)
        assert output.kv_canary_forwards == number + 1
        assert output.kv_canary_cached_counts[0].cached == number + 1
    assert [record.message.partition(" in ")[0] for record in caplog.records] == [
        "canary_obs: due_reports failed", "canary_obs: send_keys failed"
    ]  # fmt: skip
