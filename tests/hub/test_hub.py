from __future__ import annotations

import itertools
import threading

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.errors import WireError
from canary_obs.hub.commands import NoEngine, StartSweepRequest, UnknownGroup
from canary_obs.hub.hub import Hub
from canary_obs.hub.sweeps import SweepInProgress
from canary_obs.hub.violation_store import ViolationFilter
from canary_obs.records import (
    Acknowledge,
    CancelSweep,
    Goodbye,
    Ping,
    Resume,
    StartSweep,
    SweepReport,
    Violations,
)
from canary_obs.vocabulary import PerturbMode, Phase, Reason, State, SweepStatus, Trigger
from tests.service.fakes import hello, identity, progress, snapshot, violation


class Bench:
    """A hub on a clock that only the test moves, and what it said to each rank."""

    def __init__(self, **settings):
        self.now = 100.0
        self.wall = 2_000_000_000
        self.said = {}
        self.sequence = itertools.count(1)
        self.hub = Hub(ServiceConfig(**settings), clock=lambda: self.now, wall_ns=lambda: self.wall)

    def says(self, *messages):
        for message in messages:
            box = self.said.setdefault(message.identity.key, [])
            self.hub.ingest(message, box.append)

    def attach(self, rank=0, **changes):
        me = identity(rank, **changes)
        self.says(hello(me), self.snapshot(me))
        return me

    def snapshot(self, me, **changes):
        return snapshot(me, next(self.sequence), time_ns=self.wall, **changes)

    def heard(self, kind, rank=0):
        return [command for command in self.said[identity(rank).key] if isinstance(command, kind)]

    def sweep_id(self, rank=0):
        return self.heard(StartSweep, rank)[-1].id


@pytest.fixture
def bench():
    return Bench()


def total_violations(rank):
    return rank.totals.groups["full"].violations[Phase.SWEEP][Reason.KV_DATA]


# The verdict.


def test_without_an_engine_the_state_is_off(bench):
    assert bench.hub.verdict() == (State.OFF, ("no engine is attached",))


def test_the_worst_rank_decides_and_is_named(bench):
    bench.attach(0)
    me = bench.attach(1)
    assert bench.hub.verdict() == (State.OK, ())
    bench.says(bench.snapshot(me, violations=2))
    assert bench.hub.verdict() == (State.VIOLATED, ("fake/test/1: 2 violations",))


def test_a_silent_rank_is_blind_and_recovers(bench):
    me = bench.attach()
    bench.now += 5.1
    state, reasons = bench.hub.verdict()
    assert (state, reasons) == (State.BLIND, ("fake/test/0: latest snapshot is 5.1 s old",))
    bench.says(bench.snapshot(me))
    assert bench.hub.verdict()[0] is State.OK


def test_a_snapshot_that_was_late_is_as_old_as_it_is(bench):
    me = bench.attach()
    bench.wall += 60_000_000_000
    bench.says(snapshot(me, 99, time_ns=bench.wall - 30_000_000_000))
    assert bench.hub.ranks()[0].snapshot_age == pytest.approx(30.0)
    assert bench.hub.verdict()[0] is State.BLIND


def test_a_rank_that_sends_everything_but_snapshots_is_blind(bench):
    bench.says(hello(identity()))
    assert bench.hub.verdict()[0] is State.DEGRADED
    bench.now += 5.1
    assert bench.hub.verdict()[0] is State.BLIND


def test_a_violated_rank_stays_violated_when_it_falls_silent(bench):
    me = bench.attach()
    bench.says(bench.snapshot(me, violations=1))
    bench.now += 60
    state, reasons = bench.hub.verdict()
    assert state is State.VIOLATED
    assert any("60.0 s old" in reason for reason in reasons)
    assert any("1 violations" in reason for reason in reasons)


def test_a_rank_that_said_goodbye_is_off_not_blind(bench):
    me = bench.attach()
    bench.says(Goodbye(identity=me, final=bench.snapshot(me)))
    bench.now += 60
    assert bench.hub.verdict() == (State.OFF, ("no engine is attached",))
    assert bench.hub.ranks()[0].state is State.OFF


def test_goodbye_leaves_damage_open_until_acknowledged(bench):
    me = bench.attach()
    bench.says(Goodbye(identity=me, final=bench.snapshot(me, violations=1)))
    assert bench.hub.verdict()[0] is State.VIOLATED
    assert bench.hub.acknowledge() == 0
    assert bench.hub.verdict()[0] is State.OFF


def test_acknowledging_dismisses_a_dead_rank_and_tells_live_ones(bench):
    bench.attach(0)
    bench.now += 6
    bench.attach(1)
    assert bench.hub.verdict()[0] is State.BLIND
    assert bench.hub.acknowledge() == 1
    assert bench.heard(Acknowledge, 1) == [Acknowledge()]
    assert bench.heard(Acknowledge, 0) == []
    assert bench.hub.verdict()[0] is State.OK


def test_a_fault_of_the_service_is_blindness_until_acknowledged(bench):
    bench.attach()
    bench.hub.fault("zmq_listener", RuntimeError("planted"))
    state, reasons = bench.hub.verdict()
    assert state is State.BLIND
    assert "zmq_listener: RuntimeError: planted" in reasons[0]
    bench.hub.acknowledge()
    assert bench.hub.verdict()[0] is State.OK
    bench.hub.fault("violation_log", OSError("full"), State.DEGRADED)
    assert bench.hub.verdict()[0] is State.DEGRADED


def test_undecodable_frames_degrade(bench):
    bench.attach()
    bench.hub.undecodable_frame(WireError("protocol version 1, this side speaks 2"))
    state, reasons = bench.hub.verdict()
    assert state is State.DEGRADED
    assert "protocol version 1" in reasons[0]
    assert bench.hub.counts().undecodable == 1


# Restarts.


def test_counters_are_carried_over_a_restart(bench):
    me = bench.attach(started_ns=1_000)
    bench.says(snapshot(me, 50, violations=3, time_ns=bench.wall))
    again = identity(started_ns=2_000)
    bench.says(hello(again))
    assert bench.hub.ranks()[0].totals.step == 50
    bench.says(snapshot(again, 1, violations=1, time_ns=bench.wall))
    rank = bench.hub.ranks()[0]
    assert rank.restarts == 1
    assert rank.snapshot.step == 1
    assert rank.totals.step == 51
    assert total_violations(rank) == 4
    assert rank.totals.groups["full"].verified[Phase.HEAD] == 510
    assert rank.totals.overhead_seconds["head"] == pytest.approx(0.25 * 51)
    assert rank.totals.sweep_passes[Trigger.IDLE] == 51
    assert rank.totals.pipeline.skipped == 51
    assert rank.totals.pipeline.lag_steps == 1
    assert rank.totals.patrol.cycles == 51
    planted = rank.totals.perturbations[PerturbMode.REAL_KV_USED]
    assert (planted.injected, planted.open) == (51, 1)


def test_a_group_that_is_gone_after_a_restart_keeps_its_counts(bench):
    me = bench.attach(started_ns=1_000)
    last = bench.snapshot(me)
    bench.says(last)
    again = identity(started_ns=2_000)
    bench.says(snapshot(again, 1, time_ns=bench.wall, groups={}))
    assert bench.hub.ranks()[0].totals.groups == last.groups


def test_an_older_snapshot_does_not_replace_a_newer_one(bench):
    me = bench.attach()
    bench.says(snapshot(me, 50, time_ns=bench.wall), snapshot(me, 49, time_ns=bench.wall))
    assert bench.hub.ranks()[0].snapshot.step == 50


def test_leftovers_of_a_dead_process_are_refused_quietly(bench):
    old = bench.attach(started_ns=1_000)
    bench.attach(started_ns=bench.wall)
    bench.says(snapshot(old, 99, time_ns=bench.wall - 1))
    assert bench.hub.counts().refused == 1
    assert bench.hub.verdict()[0] is State.OK
    assert bench.hub.ranks()[0].totals.step < 99


def test_two_live_processes_under_one_name_are_blindness(bench):
    old = bench.attach(started_ns=1_000, pid=11)
    bench.attach(started_ns=bench.wall, pid=22)
    bench.says(snapshot(old, 99, time_ns=bench.wall + 1))
    state, reasons = bench.hub.verdict()
    assert state is State.BLIND
    assert "process 11 reports as the same rank" in reasons[0]


def test_a_clock_set_back_does_not_lock_a_restarted_engine_out(bench):
    bench.attach(started_ns=9_000)
    bench.now += 6
    again = identity(started_ns=1_000)
    bench.says(snapshot(again, 1, time_ns=bench.wall))
    assert bench.hub.ranks()[0].identity.started_ns == 1_000
    assert bench.hub.verdict()[0] is State.OK


# Pings.


def test_an_unknown_rank_is_asked_for_its_hello_at_once(bench):
    me = identity()
    bench.says(bench.snapshot(me), bench.snapshot(me))
    assert bench.heard(Ping) == [Ping(want_hello=True)]
    bench.says(hello(me))
    bench.now += 1
    bench.hub.tick()
    assert bench.heard(Ping)[1:] == [Ping(want_hello=False)]


def test_ticks_ping_at_least_once_a_second_and_not_every_time(bench):
    bench.attach()
    for _ in range(50):
        bench.now += 0.2
        bench.hub.tick()
    assert 10 <= len(bench.heard(Ping)) <= 21


# Sweeps.


def test_a_sweep_ends_when_every_rank_has(bench):
    first, second = bench.attach(0), bench.attach(1)
    record = bench.hub.start_sweep(StartSweepRequest(groups=("full",), data=False))
    assert record.status is SweepStatus.RUNNING
    assert bench.heard(StartSweep, 1) == [StartSweep(id=record.id, groups=("full",), data=False)]
    ended = bench.hub.sweep_future(record.id)
    bench.says(SweepReport(identity=first, progress=progress(record.id, SweepStatus.PASSED)))
    assert not ended.done()
    bench.says(SweepReport(identity=second, progress=progress(record.id, SweepStatus.PASSED)))
    assert ended.result(0).status is SweepStatus.PASSED
    assert bench.hub.sweep_future(record.id).result(0).ended_ns is not None


@pytest.mark.parametrize(
    ("statuses", "result"),
    [
        (("passed", "violated", "failed"), "violated"),
        (("passed", "failed", "cancelled"), "failed"),
        (("passed", "cancelled", "passed"), "cancelled"),
    ],
)
def test_the_gravest_rank_decides_a_sweep(bench, statuses, result):
    ranks = [bench.attach(number) for number in range(3)]
    record = bench.hub.start_sweep(StartSweepRequest())
    for me, status in zip(ranks, statuses, strict=True):
        bench.says(SweepReport(identity=me, progress=progress(record.id, SweepStatus(status))))
    assert bench.hub.sweep(record.id).status is SweepStatus(result)


def test_one_sweep_at_a_time(bench):
    bench.attach()
    running = bench.hub.start_sweep(StartSweepRequest())
    with pytest.raises(SweepInProgress) as caught:
        bench.hub.start_sweep(StartSweepRequest())
    assert caught.value.running_id == running.id


def test_an_automatic_sweep_does_not_stand_in_the_way(bench):
    me = bench.attach()
    automatic = progress("idle-1", SweepStatus.RUNNING, trigger=Trigger.IDLE)
    bench.says(SweepReport(identity=me, progress=automatic))
    bench.hub.start_sweep(StartSweepRequest())
    assert [record.trigger for record in bench.hub.sweeps()] == [Trigger.DEMAND, Trigger.IDLE]


@pytest.mark.parametrize("how", ["silent", "goodbye", "restart", "stuck"])
def test_a_sweep_never_hangs_on_a_rank_that_is_gone(how):
    bench = Bench(sweep_timeout_seconds=30.0)
    me = bench.attach()
    record = bench.hub.start_sweep(StartSweepRequest())
    reason = {
        "silent": "the rank went silent",
        "goodbye": "the engine detached",
        "restart": "the engine restarted",
        "stuck": "no progress for 30 s",
    }[how]
    if how == "silent":
        bench.now += 6
        bench.hub.tick()
    elif how == "goodbye":
        bench.says(Goodbye(identity=me, final=bench.snapshot(me)))
    elif how == "restart":
        bench.attach(started_ns=2_000)
    else:
        for _ in range(32):
            bench.now += 1
            bench.says(bench.snapshot(me))
            bench.hub.tick()
        assert bench.heard(CancelSweep) == [CancelSweep(id=record.id)]
    ended = bench.hub.sweep_future(record.id).result(0)
    assert ended.status is SweepStatus.FAILED
    assert ended.ranks[0].error == reason


def test_a_slow_sweep_that_moves_is_left_alone():
    bench = Bench(sweep_timeout_seconds=3.0)
    me = bench.attach()
    record = bench.hub.start_sweep(StartSweepRequest())
    for checked in range(1, 21):
        bench.now += 2
        report = progress(record.id, SweepStatus.RUNNING, checked=checked)
        bench.says(bench.snapshot(me, sweep=report))
        bench.hub.tick()
    assert bench.hub.sweep(record.id).status is SweepStatus.RUNNING


def test_the_end_of_a_sweep_is_found_in_a_snapshot_when_its_report_was_lost(bench):
    me = bench.attach()
    record = bench.hub.start_sweep(StartSweepRequest())
    bench.says(bench.snapshot(me, sweep=progress(record.id, SweepStatus.VIOLATED, checked=100)))
    assert bench.hub.sweep_future(record.id).result(0).status is SweepStatus.VIOLATED


def test_a_sweep_the_service_forgot_in_a_restart_is_taken_up_again(bench):
    me = bench.attach()
    bench.says(SweepReport(identity=me, progress=progress("before", SweepStatus.RUNNING)))
    with pytest.raises(SweepInProgress, match="before"):
        bench.hub.start_sweep(StartSweepRequest())
    bench.says(SweepReport(identity=me, progress=progress("before", SweepStatus.PASSED)))
    assert bench.hub.start_sweep(StartSweepRequest()).status is SweepStatus.RUNNING


def test_cancelling_tells_the_ranks_still_at_it(bench):
    first, _ = bench.attach(0), bench.attach(1)
    record = bench.hub.start_sweep(StartSweepRequest())
    bench.says(SweepReport(identity=first, progress=progress(record.id, SweepStatus.PASSED)))
    assert bench.hub.cancel(record.id).status is SweepStatus.RUNNING
    assert bench.heard(CancelSweep, 0) == []
    assert bench.heard(CancelSweep, 1) == [CancelSweep(id=record.id)]
    assert bench.hub.cancel("nobody knows") is None


def test_refusals_of_a_sweep_say_why(bench):
    with pytest.raises(NoEngine, match="no engine is attached"):
        bench.hub.start_sweep(StartSweepRequest())
    bench.attach()
    with pytest.raises(UnknownGroup, match=r"no rank has the groups swa; there are: full"):
        bench.hub.start_sweep(StartSweepRequest(groups=("full", "swa")))
    bench.now += 6
    with pytest.raises(NoEngine, match=r"latest snapshot is 6\.0 s old"):
        bench.hub.start_sweep(StartSweepRequest())


def test_sweep_history_is_bounded_and_keeps_the_running_one(bench):
    me = bench.attach()
    record = bench.hub.start_sweep(StartSweepRequest())
    for number in range(400):
        done = progress(f"idle-{number}", SweepStatus.PASSED, trigger=Trigger.IDLE)
        bench.says(SweepReport(identity=me, progress=done))
    assert len(bench.hub.sweeps()) == 256
    assert bench.hub.sweep(record.id).status is SweepStatus.RUNNING


def test_a_waiter_in_another_thread_is_woken(bench):
    me = bench.attach()
    record = bench.hub.start_sweep(StartSweepRequest())
    results = []
    waiter = threading.Thread(target=lambda: results.append(bench.hub.sweep_future(record.id).result(10)))
    waiter.start()
    bench.says(SweepReport(identity=me, progress=progress(record.id, SweepStatus.PASSED)))
    waiter.join(10)
    assert [result.status for result in results] == [SweepStatus.PASSED]


def test_a_waiter_that_gave_up_does_not_disturb_the_end(bench):
    me = bench.attach()
    record = bench.hub.start_sweep(StartSweepRequest())
    assert bench.hub.sweep_future(record.id).cancel()
    bench.says(SweepReport(identity=me, progress=progress(record.id, SweepStatus.PASSED)))
    assert bench.hub.sweep(record.id).status is SweepStatus.PASSED


# Orders and violations.


def test_pause_and_resume_reach_live_ranks(bench):
    with pytest.raises(NoEngine):
        bench.hub.pause()
    bench.attach(0)
    bench.attach(1)
    assert bench.hub.pause() == 2
    assert bench.hub.resume() == 2
    assert bench.heard(Resume, 1) == [Resume()]


def test_violations_are_numbered_bounded_and_filtered():
    bench = Bench(violations_kept=3)
    me, other = bench.attach(0), bench.attach(1)
    seen = []
    bench.hub.subscribe(seen.extend)
    bench.says(Violations(identity=me, rows=(violation(1), violation(2))))
    bench.says(Violations(identity=other, rows=(violation(3, reason=Reason.CHAIN), violation(4))))
    assert [event.number for event in bench.hub.violations()] == [4, 3, 2]
    assert bench.hub.counts().evicted == 1
    assert [event.violation.slot for event in seen] == [1, 2, 3, 4]

    def slots(**wanted):
        return [event.violation.slot for event in bench.hub.violations(ViolationFilter(**wanted))]

    assert slots(reason=Reason.CHAIN) == [3]
    assert slots(rank=0) == [2]
    assert slots(after=3) == [4]
    assert slots(before=4, phase=Phase.SWEEP, group="full") == [3, 2]
    assert slots(group="swa") == []


def test_ranks_are_bounded_the_longest_silent_goes(bench):
    for number in range(1100):
        bench.now += 0.001
        bench.says(hello(identity(number)))
    ranks = bench.hub.ranks()
    assert len(ranks) == 1024
    assert min(rank.identity.rank for rank in ranks) == 76
