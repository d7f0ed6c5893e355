"""A sweep that outlived a restart of the service is exported with the times at which it took place."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.hub import Hub
from canary_obs.records import SweepReport
from canary_obs.telemetry.tracing import open_tracing
from canary_obs.vocabulary import SweepStatus
from tests.service.fakes import eventually, hello, identity, progress, snapshot
from tests.telemetry.receiver import Receiver, open_server

SECOND = 1_000_000_000
BEGAN, ENDED = 100 * SECOND, 160 * SECOND


class Wall:
    """Nanoseconds that a test sets."""

    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def receiver(environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf")
    yield receiver
    server.close()


def attach(hub: Hub, who, **fields) -> None:
    hub.ingest(hello(who), lambda command: None)
    hub.ingest(snapshot(who, 1, **fields), lambda command: None)


def times(span) -> tuple[float, float]:
    return span.body.start_time_unix_nano / SECOND, span.body.end_time_unix_nano / SECOND


def started_by_a_service_that_ends(who) -> str:
    """The first service starts the sweep and is gone before its end; returns the sweep's id."""
    first = Hub(ServiceConfig(snapshot_stale_seconds=600.0), wall_ns=Wall(BEGAN))
    tracing = open_tracing(first)
    attach(first, who)
    sweep = first.start_sweep(StartSweepRequest())
    running = progress(sweep.id, SweepStatus.RUNNING, checked=10, started_ns=BEGAN, seconds=1.0)
    first.ingest(SweepReport(identity=who, progress=running), lambda command: None)
    tracing.close()
    return sweep.id


def test_a_sweep_that_ends_under_the_next_service(receiver):
    who = identity()
    sweep_id = started_by_a_service_that_ends(who)
    assert receiver.spans == []  # it has not ended
    wall = Wall(BEGAN + 50 * SECOND)
    second = Hub(ServiceConfig(snapshot_stale_seconds=600.0), wall_ns=wall)
    tracing = open_tracing(second)
    running = progress(sweep_id, SweepStatus.RUNNING, checked=90, started_ns=BEGAN, seconds=50.0)
    attach(second, who, sweep=running)
    wall.now = ENDED
    passed = progress(sweep_id, SweepStatus.PASSED, checked=100, started_ns=BEGAN, seconds=60.0)
    second.ingest(SweepReport(identity=who, progress=passed), lambda command: None)
    tracing.close()
    (root,), (part,) = receiver.named("kv_canary.sweep"), receiver.named("kv_canary.sweep.rank")
    assert root.attributes["kv_canary.sweep.id"] == sweep_id
    assert times(root) == times(part) == (100, 160)


def test_a_sweep_that_ended_while_no_service_ran(receiver):
    who = identity()
    sweep_id = started_by_a_service_that_ends(who)
    second = Hub(ServiceConfig(snapshot_stale_seconds=600.0), wall_ns=Wall(ENDED + 3600 * SECOND))
    tracing = open_tracing(second)
    passed = progress(sweep_id, SweepStatus.PASSED, checked=100, started_ns=BEGAN, seconds=60.0)
    attach(second, who, sweep=passed)
    assert second.sweep(sweep_id).ended_ns == ENDED
    tracing.close()
    (root,), (part,) = receiver.named("kv_canary.sweep"), receiver.named("kv_canary.sweep.rank")
    assert times(root) == times(part) == (100, 160)


def test_a_rank_that_reports_after_the_others_is_not_lost(receiver):
    ranks = identity(0), identity(1)
    hub = Hub(ServiceConfig(snapshot_stale_seconds=600.0), wall_ns=Wall(ENDED + SECOND))
    tracing = open_tracing(hub)
    for who, seconds in zip(ranks, (60.0, 59.0), strict=True):
        ended = progress("s", SweepStatus.PASSED, checked=100, started_ns=BEGAN, seconds=seconds)
        seen = {record.id: record.version for record in hub.sweeps()}
        attach(hub, who, sweep=ended)
        assert [record.id for record in hub.sweeps(seen)] == ["s"]  # event streams ask like this
        assert hub.sweeps({record.id: record.version for record in hub.sweeps()}) == []
        eventually(lambda who=who: len(receiver.named("kv_canary.sweep.rank")) == who.rank + 1)
    assert hub.sweep("s").ended_ns == ENDED
    tracing.close()
    (root,), parts = receiver.named("kv_canary.sweep"), receiver.named("kv_canary.sweep.rank")
    assert [times(part) for part in parts] == [(100, 160), (100, 159)]
    assert {part.body.parent_span_id for part in parts} == {root.body.span_id}


def test_a_sweep_that_fell_silent_ends_when_that_was_seen():
    wall = Wall(ENDED)
    hub = Hub(ServiceConfig(snapshot_stale_seconds=600.0), wall_ns=wall)
    running = progress("s", SweepStatus.RUNNING, checked=10, started_ns=BEGAN, seconds=1.0)
    attach(hub, identity(), sweep=running)
    wall.now = ENDED + SECOND
    attach(hub, identity(started_ns=2_000))
    record = hub.sweep("s")
    assert (record.status, record.ended_ns) == (SweepStatus.FAILED, ENDED + SECOND)
