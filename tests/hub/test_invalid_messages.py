"""Messages of an admitted peer whose values cannot be: refused, counted, logged, and shown in the verdict."""

from __future__ import annotations

import math

import msgspec
import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.hub.message_check import LABEL_LENGTH, NAMES, RANKS
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies, PerturbCount
from canary_obs.records import Goodbye, StepUnderWay, SweepReport, Violations
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.transport.links import ZmqLink
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import PerturbMode, State, SweepStatus
from tests.service.fakes import (
    counters,
    drilled,
    eventually,
    hello,
    identity,
    progress,
    snapshot as faked,
    violation,
)

ME = identity()
STALE = ServiceConfig().snapshot_stale_seconds
LONG = "x" * (LABEL_LENGTH + 1)


def snapshot(who, sequence, **changes):
    """Every counter is `sequence`, or a multiple of it, unless changed."""
    return msgspec.structs.replace(faked(who, sequence), **changes)


class Service:
    """A hub on a clock that only the test advances, with one rank that sent a good snapshot."""

    def __init__(self):
        self.now = 100.0
        self.hub = Hub(clock=lambda: self.now, wall_ns=lambda: 1_000)
        self.send(hello(ME), snapshot(ME, 10))

    def send(self, *messages):
        for message in messages:
            self.hub.ingest(message, lambda command: None)

    def refused(self):
        return {cause: count for cause, count in self.hub.counts().invalid.items() if count}

    def page(self):
        return Exposition(HubCollector(self.hub)).page("")[0].decode()


@pytest.fixture
def service():
    return Service()


def of_latency(**changes):
    return {PerturbMode.REAL_KV_USED: PerturbCount(latency=Latencies(**changes))}


def of_sweep(name, **changes):
    return SweepReport(identity=ME, progress=progress(name, SweepStatus.PASSED, **changes))


def with_group(**changes):
    return {"groups": {"full": msgspec.structs.replace(counters(11), **changes)}}


@pytest.mark.parametrize(
    ("changes", "cause", "text"),
    [
        ({"step": 9}, "falling", "step=9: a counter cannot fall; it was 10."),
        ({"step_seconds": 9.5}, "falling", "step_seconds=9.5: a counter cannot fall; it was 10.0."),
        ({"step_seconds": -1.0}, "negative", "step_seconds=-1.0: it cannot be negative."),
        ({"step_seconds": math.nan}, "not_finite", "step_seconds=nan: numbers are finite."),
        ({"step_seconds": math.inf}, "not_finite", "step_seconds=inf: numbers are finite."),
        ({"overhead_seconds": {"head": math.nan}}, "not_finite", "overhead_seconds.head=nan"),
        ({"overhead_seconds": {"head": 0.1}}, "falling", "overhead_seconds.head=0.1"),
        (with_group(written=-1), "negative", "groups.full.written=-1"),
        (with_group(written=9), "falling", "groups.full.written=9"),
        ({"groups": {"full": counters(9)}}, "falling", "groups.full.runs.head=9"),
        ({"groups": {LONG: counters(9)}}, "too_long", "at most 256 characters, it has 257"),
        ({"observer_faults": {f"{n}": n for n in range(NAMES + 1)}}, "too_long", "at most 256 entries"),
        ({"pipeline": msgspec.structs.replace(snapshot(ME, 9).pipeline)}, "falling", "pipeline.skipped=9"),
        ({"patrol": snapshot(ME, 9).patrol}, "falling", "patrol.cycles=9"),
        ({"forwards": {"full": 9}}, "falling", "forwards.full=9"),
        ({"forwards": {"full": -1}}, "negative", "forwards.full=-1"),
        ({"perturbations": snapshot(ME, 9).perturbations}, "falling", "real_kv_used.injected=9"),
        ({"perturbations": of_latency(counts=())}, "buckets", "counts=0: a histogram has 15 buckets."),
        ({"perturbations": of_latency(counts=(0,) * 3)}, "buckets", "counts=3"),
        ({"perturbations": of_latency(counts=(0,) * 99)}, "buckets", "counts=99"),
        ({"sweep": progress("a", SweepStatus.RUNNING, checked=-1)}, "negative", "sweep.checked=-1"),
    ],
)
def test_a_snapshot_that_cannot_be_is_refused(service, changes, cause, text):
    before, view = service.page(), service.hub.ranks()[0]
    service.send(snapshot(ME, 11, **changes))
    assert service.refused() == {cause: 1}
    (rank,) = service.hub.ranks()
    assert (rank.snapshot, rank.totals) == (view.snapshot, view.totals)
    assert rank.state is State.DEGRADED
    assert text in rank.reasons[0]
    assert "same canary_obs release" in rank.reasons[0]
    of_rank = [line for line in before.splitlines() if 'rank="0"' in line and "_state{" not in line]
    after = set(service.page().splitlines())
    assert [line for line in of_rank if line not in after] == []


def test_of_one_count_only_what_falls_is_refused(service):
    """Gauges among counters fall as they like, and so do lists that one side leaves out."""
    fewer = snapshot(ME, 11)
    patrol = msgspec.structs.replace(fewer.patrol, progress=0.0, oldest_check_seconds=0.0)
    pipeline = msgspec.structs.replace(fewer.pipeline, lag_steps=0, lag_seconds=-1e-6)
    open_now = {PerturbMode.REAL_KV_USED: PerturbCount(injected=11, detected=11, open=0)}
    service.send(
        snapshot(ME, 11, patrol=patrol, pipeline=pipeline, perturbations=open_now, forwards=None),
        snapshot(ME, 12, patrol=None, groups={}),
    )
    assert service.refused() == {}
    assert service.hub.verdict()[0] is State.OK


def test_a_rank_whose_snapshots_are_all_refused_goes_blind_and_recovers(service):
    service.send(snapshot(ME, 11, step_seconds=math.nan))
    assert service.hub.ranks()[0].state is State.DEGRADED
    service.now += STALE + 0.1
    service.send(snapshot(ME, 12, step_seconds=math.nan))
    (rank,) = service.hub.ranks()
    assert rank.state is State.BLIND
    assert rank.reasons[0].startswith("latest snapshot is 5.1 s old")
    assert "step_seconds=nan" in rank.reasons[1]
    service.send(snapshot(ME, 13))
    assert service.hub.ranks()[0].state is State.OK
    state, reasons = service.hub.verdict()
    assert state is State.DEGRADED
    assert reasons[0].startswith("messages refused: 2, the last of fake/test/0: step_seconds=nan")
    service.hub.acknowledge()
    assert service.hub.verdict()[0] is State.OK


def test_a_rank_that_never_sent_a_good_snapshot_is_degraded_at_once_then_blind(service):
    other = identity(1)
    service.send(hello(other), snapshot(other, 1, step=-1))
    rank = service.hub.ranks()[1]
    assert rank.state is State.DEGRADED
    assert "step=-1" in rank.reasons[1]
    service.now += STALE + 0.1
    service.send(snapshot(other, 2, step=-1))
    assert service.hub.ranks()[1].state is State.BLIND


@pytest.mark.parametrize("rank", [-1, RANKS])
def test_a_rank_that_is_none_is_not_shown(service, rank):
    service.send(hello(identity(rank)), snapshot(identity(rank), 1))
    assert service.refused() == {"rank": 2}
    assert [view.identity.rank for view in service.hub.ranks()] == [0]
    assert service.hub.verdict()[0] is State.DEGRADED


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (Violations(identity=ME, rows=(violation(), violation(slots=-1))), "negative"),
        (Violations(identity=ME, rows=(violation(time_ns=-1),)), "negative"),
        (Violations(identity=ME, rows=(violation(group=LONG),)), "too_long"),
        (Violations(identity=ME, rows=(violation(sweep_id=LONG),)), "too_long"),
        (StepUnderWay(identity=ME, seconds=math.nan), "not_finite"),
        (StepUnderWay(identity=ME, seconds=-1e9), "negative"),
        (of_sweep(LONG), "too_long"),
        (
            SweepReport(identity=ME, progress=progress("a", SweepStatus.PASSED, seconds=math.inf)),
            "not_finite",
        ),
        (of_sweep("a", total=-1), "negative"),
        (msgspec.structs.replace(hello(ME), record_bytes=-1), "negative"),
        (msgspec.structs.replace(hello(ME), engine_version=LONG), "too_long"),
        (msgspec.structs.replace(hello(ME), versions={"torch": "x" * 70_000}), "too_long"),
        (hello(msgspec.structs.replace(ME, instance=LONG)), "too_long"),
        (hello(msgspec.structs.replace(ME, started_ns=-1)), "negative"),
        (Goodbye(identity=ME, final=snapshot(ME, 11, step=3)), "falling"),
        (Goodbye(identity=ME, final=snapshot(identity(1), 11)), "rank"),
    ],
)
def test_other_messages_that_cannot_be_are_refused(service, message, cause):
    before = service.hub.ranks()[0]
    service.send(message)
    assert service.refused() == {cause: 1}
    assert service.hub.violations() == []
    assert service.hub.sweeps() == []
    (rank,) = service.hub.ranks()
    assert (rank.hello, rank.snapshot, rank.departed) == (before.hello, before.snapshot, False)
    assert rank.step_seconds is None


def test_a_finding_of_a_drill_that_cannot_be_is_refused(service):
    drill, _ = service.hub.drills.start(10.0)
    report = drilled(ME, drill)
    finding = msgspec.structs.replace(report.finding, latency_ms=math.nan)
    service.send(msgspec.structs.replace(report, finding=finding))
    assert service.refused() == {"not_finite": 1}


def test_slots_and_positions_that_are_not_known_are_no_reason_to_refuse(service):
    service.send(Violations(identity=ME, rows=(violation(slot=-1, position=-1, lag_steps=-1),)))
    assert service.refused() == {}
    assert len(service.hub.violations()) == 1


def test_a_restart_and_a_snapshot_that_was_overtaken_may_count_less(service):
    service.send(snapshot(ME, 9))
    restarted = identity(started_ns=2_000)
    service.send(hello(restarted), snapshot(restarted, 1))
    assert service.refused() == {}
    assert service.hub.ranks()[0].totals.step == 11


def test_a_process_that_comes_back_cannot_count_less_than_before(service):
    """As after a clock was set back, or where two engines share a name."""
    other = identity(started_ns=2_000)
    service.send(hello(other), snapshot(other, 1))
    service.now += STALE + 0.1
    service.send(snapshot(ME, 11, step=3))
    assert service.refused() == {"falling": 1}
    service.send(hello(ME), snapshot(ME, 12, step=3))
    assert service.refused() == {"falling": 2}
    assert service.hub.ranks()[0].totals.step == 11
    service.send(snapshot(ME, 13))
    assert service.hub.ranks()[0].totals.step == 14


def test_refusals_are_logged_once_a_minute_and_cause_with_what_was_left_out(service, caplog):
    for sequence in range(11, 16):
        service.send(snapshot(ME, sequence, step=-sequence))
    service.send(snapshot(ME, 16, step_seconds=math.nan))
    assert len(caplog.records) == 2
    first = caplog.messages[0]
    assert first.startswith(
        "canary_obs: a message of fake/test/0 was refused: step=-11: it cannot be negative."
    )
    service.now += 60.0
    service.send(snapshot(ME, 17, step=-17))
    assert caplog.messages[2].endswith("(4 more since the last such line)")
    assert 'kv_canary_hub_messages_invalid_total{cause="negative"} 6.0' in service.page()


def test_one_bad_peer_takes_no_family_from_the_others_over_a_socket(tmp_path):
    """Histograms without buckets, and a third rank -1, as they were sent from outside."""
    hub, endpoint = Hub(), f"ipc://{tmp_path}/run/service.sock"
    listener, link = ZmqListener(endpoint, hub), ZmqLink(endpoint)
    counted = of_latency(counts=(1,) * (len(LATENCY_BOUNDS) + 1), seconds=1.0)
    link.send(snapshot(ME, 1, perturbations=counted))
    link.send(snapshot(identity(1), 1, perturbations=of_latency(counts=())))
    link.send(snapshot(identity(-1), 1))
    eventually(lambda: sum(hub.counts().invalid.values()) == 2)
    link.close()
    listener.close()
    page = Exposition(HubCollector(hub)).page("")[0].decode()
    assert (
        'detection_latency_seconds_count{engine="fake",instance="test",mode="real_kv_used",rank="0"} 15.0'
        in page
    )
    assert "kv_canary_scrape_errors_total 0.0" in page
    assert 'rank="-1"' not in page
