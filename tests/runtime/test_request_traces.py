"""A finding says which span sent its request to the engine, where the adapter knows that."""

from __future__ import annotations

import numpy as np

from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.records import Violation, Violations
from canary_obs.reference_engine.scheduling.request import Sampling
from tests.links import OneThreadLink

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def findings(make_rig) -> tuple[list[Violation], list[str]]:
    """What is sent of two requests, the first of which gets a wrong table entry; the names of both."""
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, idle_sweep=False, busy_sweep=False)
    for first in (5, 6):
        rig.engine.add_request(np.arange(40, dtype=np.int32) + first, Sampling(max_tokens=60))
    for _ in range(5):
        rig.engine.step()
    names = [request.id for request in rig.engine.scheduler.running]
    table, row = rig.engine.runner.pool.req_to_token, rig.engine.scheduler.running[0].row
    table[row, 4:12] = table[row, 20:28].clone()
    for _ in range(20):
        rig.engine.step()
    found = []
    while (message := link.next_message(0.0)) is not None:
        found += message.rows if isinstance(message, Violations) else ()
    assert found
    faults = rig.canary.health.faults
    return found, [*names, *(part for part, count in faults.items() if count)]


def test_findings_have_the_context_that_the_adapter_knows(make_rig, monkeypatch) -> None:
    asked: list[str] = []

    def traceparent(_adapter: ReferenceAdapter, request: str) -> str:
        asked.append(request)
        return CALLER

    monkeypatch.setattr(ReferenceAdapter, "traceparent", traceparent)
    found, names = findings(make_rig)
    named = [row for row in found if row.request is not None]
    assert {row.request for row in named} == {names[0]} == set(asked)
    assert {row.traceparent for row in named} == {CALLER}
    assert len(asked) == len(named)  # once per finding: redetections are not sent


def test_without_a_context_there_is_none(make_rig) -> None:
    found, _ = findings(make_rig)
    assert {row.traceparent for row in found} == {None}


def test_an_adapter_that_fails_costs_no_finding(make_rig, monkeypatch) -> None:
    def broken(_adapter: ReferenceAdapter, _request: str) -> str:
        raise RuntimeError("injected")

    monkeypatch.setattr(ReferenceAdapter, "traceparent", broken)
    found, names = findings(make_rig)
    assert names[0] in {row.request for row in found}
    assert {row.traceparent for row in found} == {None}
    assert names[2:] == ["evidence"]
