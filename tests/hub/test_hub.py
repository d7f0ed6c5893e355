from __future__ import annotations

import threading

import msgspec
import pytest

from canary_obs.errors import WireError
from canary_obs.hub.acknowledgements import AcknowledgeRequest
from canary_obs.hub.commands import NoEngine, StartSweepRequest, UnknownGroup
from canary_obs.hub.drills import DrillCount
from canary_obs.hub.rank_selection import RankSelection, UnknownRank
from canary_obs.hub.sweeps import SweepInProgress
from canary_obs.hub.violation_store import ViolationFilter
from canary_obs.records import (
    Acknowledge,
    CancelSweep,
    Goodbye,
    GroupCounters,
    Pause,
    Ping,
    Resume,
    StartSweep,
    StepUnderWay,
    SweepReport,
    Violations,
)
from canary_obs.vocabulary import PerturbMode, Phase, Reason, State, SweepStatus, Trigger
from tests.hub.harness import Harness
from tests.service.fakes import counters, hello, identity, progress, snapshot, violation


def total_violations(rank):
    return rank.totals.groups["full"].violations[Phase.SWEEP][Reason.KV_DATA]


# The verdict.


def test_without_an_engine_the_state_is_off(harness):
    assert harness.hub.verdict() == (State.OFF, ("no engine is attached",))


def test_the_worst_rank_determines_the_verdict_and_is_named(harness):
    harness.attach(0)
    me = harness.attach(1)
    assert harness.hub.verdict() == (State.OK, ())
    harness.send(harness.snapshot(me, violations=2))
    assert harness.hub.verdict() == (State.VIOLATED, ("fake/test/1: 2 violations",))


def test_a_silent_rank_is_blind_and_recovers(harness):
    me = harness.attach()
    harness.now += 5.1
    state, reasons = harness.hub.verdict()
    assert (state, reasons) == (State.BLIND, ("fake/test/0: latest snapshot is 5.1 s old",))
    harness.send(harness.snapshot(me))
    assert harness.hub.verdict()[0] is State.OK


def taken(harness, me, seconds_ago, sequence, *, boot="this host", ahead=0.0, wall_ahead=0.0):
    """A snapshot of an engine whose monotonic and wall clocks may differ from ours."""
    return snapshot(
        me, sequence, boot_id=boot,
        monotonic_ns=round((harness.now + ahead - seconds_ago) * 1e9),
        time_ns=round(harness.wall + (wall_ahead - seconds_ago) * 1e9),
    )  # fmt: skip


def test_a_delayed_snapshot_counts_its_delay_as_age(harness):
    me = harness.attach()
    harness.now += 60
    harness.send(taken(harness, me, 30.0, 99))
    assert harness.hub.ranks()[0].snapshot_age == pytest.approx(30.0)
    assert harness.hub.verdict()[0] is State.BLIND


def test_an_engine_whose_clock_is_behind_is_not_blind(harness):
    me = harness.attach()
    harness.send(taken(harness, me, 0.0, 99, wall_ahead=-6.0))
    (rank,) = harness.hub.ranks()
    assert (rank.snapshot_age, rank.clock_skew_seconds) == (0.0, pytest.approx(-6.0))
    assert harness.hub.verdict()[0] is State.OK
    harness.hub.start_sweep(StartSweepRequest())


@pytest.mark.parametrize("wall_ahead", [30.0, -30.0])
def test_an_old_snapshot_is_old_whatever_its_wall_clock_says(harness, wall_ahead, unchecked):
    me = harness.attach()
    harness.send(taken(harness, me, 20.0, 99, wall_ahead=wall_ahead))
    (rank,) = harness.hub.ranks()
    assert rank.snapshot_age == pytest.approx(20.0)
    assert rank.clock_skew_seconds == pytest.approx(wall_ahead)
    unchecked(
        "old snapshots from an engine whose clock is off", "reference", harness.hub.verdict(),
        names="latest snapshot is", seconds=0.0,
    )  # fmt: skip


def test_between_hosts_the_least_delay_counts_as_none(harness):
    me = harness.attach()
    ages = []
    for sequence, delay in enumerate((3.0, 1.0, 0.5, 4.5, 0.5), start=100):
        harness.now += 1
        harness.send(taken(harness, me, delay, sequence, boot="another host", ahead=-1e6))
        ages.append(harness.hub.ranks()[0].snapshot_age)
    assert ages == pytest.approx([0.0, 0.0, 0.0, 4.0, 0.0])


def test_clocks_of_hosts_may_drift(harness):
    me = harness.attach()
    for sequence in range(100, 400):  # 300 s at 100 ppm: the engine's clock is slow
        harness.now += 1
        ahead = -1e-3 * (sequence - 100)
        harness.send(taken(harness, me, 0.1, sequence, boot="another host", ahead=ahead))
    assert harness.hub.ranks()[0].snapshot_age <= 0.13


def test_a_rank_that_sends_everything_but_snapshots_is_blind(harness):
    harness.send(hello(identity()))
    waits = ("fake/test/0: attached; waiting for its first snapshot",)
    assert harness.hub.verdict() == (State.OFF, waits)
    harness.now += 5.1
    assert harness.hub.verdict()[0] is State.BLIND


def test_a_rank_may_take_its_time_to_start_but_not_for_ever(harness):
    harness.send(hello(identity()))
    for _ in range(5):
        harness.now += 3
        assert harness.hub.verdict()[0] is State.OFF
        harness.send(StepUnderWay(identity=identity(), seconds=harness.now))
    harness.now += 0.1
    assert harness.hub.verdict()[0] is State.DEGRADED


def test_a_violated_rank_stays_violated_when_it_falls_silent(harness):
    me = harness.attach()
    harness.send(harness.snapshot(me, violations=1))
    harness.now += 60
    state, reasons = harness.hub.verdict()
    assert state is State.VIOLATED
    assert any("60.0 s old" in reason for reason in reasons)
    assert any("1 violation" in reason for reason in reasons)


def test_a_detached_rank_is_off_not_blind(harness):
    me = harness.attach()
    harness.send(Goodbye(identity=me, final=harness.snapshot(me)))
    harness.now += 60
    assert harness.hub.verdict() == (State.OFF, ("no engine is attached",))
    assert harness.hub.ranks()[0].state is State.OFF


def test_a_detached_rank_stays_violated_until_acknowledged(harness):
    me = harness.attach()
    harness.send(Goodbye(identity=me, final=harness.snapshot(me, violations=1)))
    assert harness.hub.verdict()[0] is State.VIOLATED
    assert harness.hub.acknowledge().ranks == 0
    assert harness.hub.verdict()[0] is State.OFF


def test_acknowledge_dismisses_a_dead_rank_and_reaches_live_ones(harness):
    harness.attach(0)
    harness.now += 6
    harness.attach(1)
    assert harness.hub.verdict()[0] is State.BLIND
    assert harness.hub.acknowledge().ranks == 1
    seen = Acknowledge(violations=0, faults=0, events_dropped=0, messages_dropped=0)
    assert harness.received(Acknowledge, 1) == [seen]
    assert harness.received(Acknowledge, 0) == []
    assert harness.hub.verdict()[0] is State.OK


def test_an_acknowledgement_covers_what_the_service_had_received(harness):
    me = harness.attach()
    harness.send(harness.snapshot(me, violations=3))
    harness.hub.acknowledge()
    (seen,) = harness.received(Acknowledge)
    assert seen.violations == 3


def test_an_acknowledgement_covers_what_its_sender_saw(harness):
    me, other = harness.attach(0), harness.attach(1)
    harness.send(Violations(identity=me, rows=(violation(1), violation(2))))
    harness.now += 100
    harness.hub.tick()  # closes the incident
    harness.send(Violations(identity=me, rows=(violation(3),)))
    harness.send(Violations(identity=other, rows=(violation(4),)))
    harness.send(harness.snapshot(me, violations=3), harness.snapshot(other, violations=1))
    harness.hub.acknowledge(AcknowledgeRequest(up_to=2))
    assert [command.violations for command in harness.received(Acknowledge)] == [2]
    assert [command.violations for command in harness.received(Acknowledge, 1)] == [0]
    assert [incident.acknowledged for incident in harness.hub.incidents.newest_first()] == [False, True]
    harness.hub.acknowledge(AcknowledgeRequest(up_to=4))
    assert [command.violations for command in harness.received(Acknowledge)] == [2, 3]
    assert all(incident.acknowledged for incident in harness.hub.incidents.newest_first())


def test_a_dead_rank_with_damage_that_was_not_seen_is_not_dismissed(harness):
    me = harness.attach()
    harness.send(Violations(identity=me, rows=(violation(1),)), harness.snapshot(me, violations=1))
    harness.now += 6
    harness.hub.acknowledge(AcknowledgeRequest(up_to=0))
    assert harness.hub.verdict()[0] is State.VIOLATED
    harness.hub.acknowledge(AcknowledgeRequest(up_to=1))
    assert harness.hub.verdict()[0] is State.OFF


def test_a_violated_rank_that_restarts_stays_violated_until_acknowledged(harness, unchecked):
    me = harness.attach(started_ns=1_000, pid=11)
    harness.send(harness.snapshot(me, violations=2))
    again = harness.attach(started_ns=2_000, pid=12)
    unchecked(
        "a violated engine is restarted", "reference", harness.hub.verdict(),
        names="which has ended, not acknowledged", seconds=0.0,
    )  # fmt: skip
    harness.attach(started_ns=3_000, pid=13)
    assert harness.hub.verdict()[1] == (
        "fake/test/0: 2 violations of process 11, which has ended, not acknowledged",
    )
    assert again.key == me.key
    harness.hub.acknowledge()
    assert harness.hub.verdict() == (State.OK, ())


def test_a_restart_right_after_the_acknowledgement_is_not_violated(harness):
    me = harness.attach(started_ns=1_000)
    harness.send(harness.snapshot(me, violations=2))
    harness.hub.acknowledge()
    harness.attach(started_ns=2_000)
    assert harness.hub.verdict() == (State.OK, ())


def test_a_fault_of_the_service_is_blind_until_acknowledged(harness):
    harness.attach()
    harness.hub.fault("zmq_listener", RuntimeError("injected"))
    state, reasons = harness.hub.verdict()
    assert state is State.BLIND
    assert "zmq_listener: RuntimeError: injected" in reasons[0]
    harness.hub.acknowledge()
    assert harness.hub.verdict()[0] is State.OK
    harness.hub.fault("violation_log", OSError("full"), State.DEGRADED)
    assert harness.hub.verdict()[0] is State.DEGRADED


def test_undecodable_frames_degrade(harness):
    harness.attach()
    harness.hub.undecodable_frame(WireError("protocol version 1, this side speaks 2"))
    state, reasons = harness.hub.verdict()
    assert state is State.DEGRADED
    assert "protocol version 1" in reasons[0]
    assert harness.hub.counts().undecodable == 1


# Restarts.


def test_counters_are_summed_over_a_restart(harness):
    me = harness.attach(started_ns=1_000)
    harness.send(snapshot(me, 50, violations=3, time_ns=harness.wall))
    restarted = identity(started_ns=2_000)
    harness.send(hello(restarted))
    assert harness.hub.ranks()[0].totals.step == 50
    harness.send(snapshot(restarted, 1, violations=1, time_ns=harness.wall))
    rank = harness.hub.ranks()[0]
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
    perturbation = rank.totals.perturbations[PerturbMode.REAL_KV_USED]
    assert (perturbation.injected, perturbation.open) == (51, 1)


def test_three_lives_are_summed_and_one_that_returns_counts_once(harness):
    first, second, third = (identity(started_ns=number) for number in (1_000, 2_000, 3_000))
    for life, step in ((first, 50), (second, 20), (third, 3)):
        harness.send(snapshot(life, step, time_ns=0))
    assert harness.hub.ranks()[0].totals.step == 73
    harness.now += 6  # the third fell silent: the first is admitted again
    harness.send(hello(first))
    assert harness.hub.ranks()[0].totals.step == 73
    harness.send(snapshot(first, 55, time_ns=0))
    assert harness.hub.ranks()[0].totals.step == 78
    harness.now += 6
    harness.send(snapshot(second, 21, time_ns=0))
    assert harness.hub.ranks()[0].totals.step == 79
    assert harness.hub.ranks()[0].restarts == 4


def test_many_lives_are_bounded_and_none_is_lost(harness):
    for number in range(1, 31):
        harness.send(snapshot(identity(started_ns=number), 10, time_ns=0))
    assert harness.hub.ranks()[0].totals.step == 300


def test_counters_that_one_life_does_not_report_stay(harness):
    harness.send(snapshot(identity(started_ns=1), 10, forwards={"full": 10}, time_ns=0))
    harness.send(snapshot(identity(started_ns=2), 5, forwards=None, patrol=None, time_ns=0))
    totals = harness.hub.ranks()[0].totals
    assert (totals.forwards, totals.patrol.cycles) == ({"full": 10}, 10)
    harness.send(snapshot(identity(started_ns=3), 2, forwards={"full": 2}, time_ns=0))
    totals = harness.hub.ranks()[0].totals
    assert (totals.forwards, totals.patrol.cycles) == ({"full": 12}, 12)


# Ranks that an engine has and that do not report.


def expecting(me, *ranks):
    return msgspec.structs.replace(hello(me), expected_ranks=ranks)


def test_a_rank_that_was_never_heard_is_named(harness, unchecked):
    me = harness.attach(0)
    harness.send(expecting(me, 0, 1, 2))
    harness.attach(2)
    assert harness.hub.verdict()[0] is State.OK
    harness.now += 4.9
    harness.send(harness.snapshot(me), harness.snapshot(identity(2)))
    assert harness.hub.verdict()[0] is State.OK
    harness.now += 0.2
    unchecked(
        "a rank of the engine that the service never heard", "reference", harness.hub.verdict(),
        names="no word of ranks 1, which this engine has", seconds=5.1,
    )  # fmt: skip
    assert harness.hub.missing_ranks() == {("fake", "test"): (1,)}
    harness.attach(1)
    assert harness.hub.verdict() == (State.OK, ())
    assert harness.hub.missing_ranks() == {("fake", "test"): ()}


def test_a_rank_that_detached_while_the_others_go_on_is_missing(harness):
    me, other = harness.attach(0), harness.attach(1)
    harness.send(expecting(me, 0, 1), expecting(other, 0, 1))
    harness.now += 60
    harness.send(Goodbye(identity=other, final=harness.snapshot(other)), harness.snapshot(me))
    assert harness.hub.verdict()[0] is State.OK
    harness.now += 5.1
    harness.send(harness.snapshot(me))
    assert "no word of ranks 1" in harness.hub.verdict()[1][0]
    harness.send(Goodbye(identity=me, final=harness.snapshot(me)))
    assert harness.hub.verdict()[0] is State.OFF
    assert harness.hub.missing_ranks() == {}


def test_instances_do_not_expect_one_another(harness):
    for rank, instance in enumerate("ab"):
        harness.send(expecting(harness.attach(rank, instance=instance), 0, 1))
    harness.now += 5.1
    assert harness.hub.missing_ranks() == {("fake", "a"): (1,), ("fake", "b"): (0,)}


def test_a_group_that_is_gone_after_a_restart_keeps_its_counts(harness):
    me = harness.attach(started_ns=1_000)
    last = harness.snapshot(me)
    harness.send(last)
    restarted = identity(started_ns=2_000)
    harness.send(snapshot(restarted, 1, time_ns=harness.wall, groups={}))
    assert harness.hub.ranks()[0].totals.groups == last.groups


def test_an_older_snapshot_does_not_replace_a_newer_one(harness):
    me = harness.attach()
    harness.send(snapshot(me, 50, time_ns=harness.wall), snapshot(me, 49, time_ns=harness.wall))
    assert harness.hub.ranks()[0].snapshot.step == 50


def test_late_messages_of_a_dead_process_are_refused(harness):
    old = harness.attach(started_ns=1_000)
    harness.attach(started_ns=harness.wall)
    harness.send(snapshot(old, 99, time_ns=harness.wall - 1))
    assert harness.hub.counts().refused == 1
    assert harness.hub.verdict()[0] is State.OK
    assert harness.hub.ranks()[0].totals.step < 99


def test_two_live_processes_of_one_rank_are_blind(harness):
    old = harness.attach(started_ns=1_000, pid=11)
    harness.attach(started_ns=harness.wall, pid=22)
    harness.send(snapshot(old, 99, time_ns=harness.wall + 1))
    state, reasons = harness.hub.verdict()
    assert state is State.BLIND
    assert "process 11 reports as the same rank" in reasons[0]


def test_a_clock_set_back_does_not_refuse_a_restarted_engine(harness):
    harness.attach(started_ns=9_000)
    harness.now += 6
    restarted = identity(started_ns=1_000)
    harness.send(snapshot(restarted, 1, time_ns=harness.wall))
    assert harness.hub.ranks()[0].identity.started_ns == 1_000
    assert harness.hub.verdict()[0] is State.OK


# Expiry.


def test_ranks_that_left_or_fell_silent_are_forgotten_after_an_hour(harness):
    silent, left, live = (harness.attach(rank) for rank in range(3))
    harness.hub.drills._counts = {left.key: DrillCount(), live.key: DrillCount()}
    harness.send(Goodbye(identity=left, final=harness.snapshot(left)))
    for _ in range(59):
        harness.now += 60
        harness.send(harness.snapshot(live))
        harness.hub.tick()
    assert len(harness.hub.ranks()) == 3
    assert harness.hub.verdict()[0] is State.BLIND
    harness.now += 60
    harness.send(harness.snapshot(live))
    harness.hub.tick()
    assert [rank.identity for rank in harness.hub.ranks()] == [live]
    assert (harness.hub.counts().expired, harness.hub.drills.counts()) == (2, {live.key: DrillCount()})
    assert harness.hub.verdict()[0] is State.OK
    assert silent.key not in {rank.identity.key for rank in harness.hub.ranks()}


def test_a_violated_rank_is_forgotten_once_it_is_acknowledged(harness):
    me = harness.attach()
    harness.send(harness.snapshot(me, violations=1))
    harness.now += 7200
    harness.hub.tick()
    assert harness.hub.verdict()[0] is State.VIOLATED
    harness.hub.acknowledge()
    harness.hub.tick()
    assert harness.hub.ranks() == ()


def test_a_rank_in_a_step_of_hours_is_not_forgotten(harness):
    me = harness.attach()
    for seconds in range(0, 7200, 2):
        harness.now += 2
        harness.send(under_way(seconds))
        harness.hub.tick()
    assert [rank.identity for rank in harness.hub.ranks()] == [me]
    assert harness.hub.counts().expired == 0


# Findings.


def test_a_row_that_is_sent_again_is_stored_once(harness):
    me = harness.attach()
    rows = (violation(3), violation(4))
    harness.send(Violations(identity=me, rows=rows[:1]), Violations(identity=me, rows=rows))
    assert [event.violation.slot for event in harness.hub.violations()] == [4, 3]
    (incident,) = harness.hub.incidents.newest_first()
    assert incident.violations == 2
    restarted = harness.attach(started_ns=harness.wall)  # its events count from 1 again
    harness.send(Violations(identity=restarted, rows=rows[:1]))
    assert len(harness.hub.violations()) == 3


def test_what_is_seen_again_keeps_its_incident_open_until_it_is_acknowledged(harness):
    me = harness.attach()
    harness.send(Violations(identity=me, rows=(violation(3),)))
    (opened,) = harness.hub.incidents.newest_first()
    for step in range(60, 66):  # a patrol meets the damage every half minute
        harness.now += 30
        harness.wall += 30_000_000_000
        harness.send(snapshot(me, step, time_ns=harness.wall, groups={"full": redetected(step)}))
        harness.hub.tick()
    (incident,) = harness.hub.incidents.newest_first()
    assert (incident.closed_ns, incident.violations) == (None, 1)
    assert incident.last_ns > opened.last_ns
    harness.hub.acknowledge()
    harness.send(snapshot(me, 70, time_ns=harness.wall, groups={"full": redetected(70)}))
    (incident,) = harness.hub.incidents.newest_first()
    assert incident.closed_ns is not None


def redetected(times: int) -> GroupCounters:
    return msgspec.structs.replace(counters(1, 1), redetections=dict.fromkeys(Reason, times))


# Pings.


def test_an_unknown_rank_is_asked_for_its_hello_at_once(harness):
    me = identity()
    harness.send(harness.snapshot(me), harness.snapshot(me))
    assert harness.received(Ping) == [Ping(want_hello=True)]
    harness.send(hello(me))
    harness.now += 1
    harness.hub.tick()
    assert harness.received(Ping)[1:] == [Ping(want_hello=False)]


def test_ticks_ping_at_least_once_a_second_but_not_every_time(harness):
    harness.attach()
    for _ in range(50):
        harness.now += 0.2
        harness.hub.tick()
    assert 10 <= len(harness.received(Ping)) <= 21


# Sweeps.


def test_a_sweep_ends_when_it_ended_on_every_rank(harness):
    first, second = harness.attach(0), harness.attach(1)
    record = harness.hub.start_sweep(StartSweepRequest(groups=("full",), data=False))
    assert record.status is SweepStatus.RUNNING
    assert harness.received(StartSweep, 1) == [StartSweep(id=record.id, groups=("full",), data=False)]
    ended = harness.hub.sweep_future(record.id)
    harness.send(SweepReport(identity=first, progress=progress(record.id, SweepStatus.PASSED)))
    assert not ended.done()
    harness.send(SweepReport(identity=second, progress=progress(record.id, SweepStatus.PASSED)))
    assert ended.result(0).status is SweepStatus.PASSED
    assert harness.hub.sweep_future(record.id).result(0).ended_ns is not None


@pytest.mark.parametrize(
    ("statuses", "result"),
    [
        (("passed", "violated", "failed"), "violated"),
        (("passed", "failed", "cancelled"), "failed"),
        (("passed", "cancelled", "passed"), "cancelled"),
    ],
)
def test_the_worst_rank_determines_a_sweeps_status(harness, statuses, result):
    ranks = [harness.attach(number) for number in range(3)]
    record = harness.hub.start_sweep(StartSweepRequest())
    for me, status in zip(ranks, statuses, strict=True):
        harness.send(SweepReport(identity=me, progress=progress(record.id, SweepStatus(status))))
    assert harness.hub.sweep(record.id).status is SweepStatus(result)


def test_one_sweep_at_a_time(harness):
    harness.attach()
    running = harness.hub.start_sweep(StartSweepRequest())
    with pytest.raises(SweepInProgress) as caught:
        harness.hub.start_sweep(StartSweepRequest())
    assert caught.value.running_id == running.id


def test_an_automatic_sweep_does_not_block_a_demanded_one(harness):
    me = harness.attach()
    automatic = progress("idle-1", SweepStatus.RUNNING, trigger=Trigger.IDLE)
    harness.send(SweepReport(identity=me, progress=automatic))
    harness.hub.start_sweep(StartSweepRequest())
    assert [record.trigger for record in harness.hub.sweeps()] == [Trigger.DEMAND, Trigger.IDLE]


@pytest.mark.parametrize("how", ["silent", "goodbye", "restart", "stuck"])
def test_a_sweep_ends_when_a_rank_is_gone_or_stuck(how):
    harness = Harness(sweep_timeout_seconds=30.0)
    me = harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    reason = {
        "silent": "the rank went silent",
        "goodbye": "the engine detached",
        "restart": "the engine restarted",
        "stuck": "no progress for 30 s",
    }[how]
    if how == "silent":
        harness.now += 6
        harness.hub.tick()
    elif how == "goodbye":
        harness.send(Goodbye(identity=me, final=harness.snapshot(me)))
    elif how == "restart":
        harness.attach(started_ns=2_000)
    else:
        for _ in range(32):
            harness.now += 1
            harness.send(harness.snapshot(me))
            harness.hub.tick()
        assert harness.received(CancelSweep) == [CancelSweep(id=record.id)]
    ended = harness.hub.sweep_future(record.id).result(0)
    assert ended.status is SweepStatus.FAILED
    assert ended.ranks[0].error == reason


def test_a_slow_sweep_with_progress_does_not_time_out():
    harness = Harness(sweep_timeout_seconds=3.0)
    me = harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    for checked in range(1, 21):
        harness.now += 2
        report = progress(record.id, SweepStatus.RUNNING, checked=checked)
        harness.send(harness.snapshot(me, sweep=report))
        harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.RUNNING


def test_a_snapshot_ends_a_sweep_whose_report_was_lost(harness):
    me = harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    harness.send(harness.snapshot(me, sweep=progress(record.id, SweepStatus.VIOLATED, checked=100)))
    assert harness.hub.sweep_future(record.id).result(0).status is SweepStatus.VIOLATED


def test_a_sweep_started_before_a_service_restart_is_recorded(harness):
    me = harness.attach()
    harness.send(SweepReport(identity=me, progress=progress("before", SweepStatus.RUNNING)))
    assert harness.hub.sweep("before").status is SweepStatus.RUNNING
    harness.send(SweepReport(identity=me, progress=progress("before", SweepStatus.PASSED)))
    assert harness.hub.sweep("before").status is SweepStatus.PASSED


def test_cancel_reaches_the_ranks_that_still_sweep(harness):
    first, _ = harness.attach(0), harness.attach(1)
    record = harness.hub.start_sweep(StartSweepRequest())
    harness.send(SweepReport(identity=first, progress=progress(record.id, SweepStatus.PASSED)))
    assert harness.hub.sweep_control.cancel(record.id).status is SweepStatus.RUNNING
    assert harness.received(CancelSweep, 0) == []
    assert harness.received(CancelSweep, 1) == [CancelSweep(id=record.id)]
    assert harness.hub.sweep_control.cancel("unknown") is None


def test_a_refused_sweep_names_the_reason(harness):
    with pytest.raises(NoEngine, match="no engine is attached"):
        harness.hub.start_sweep(StartSweepRequest())
    harness.attach()
    with pytest.raises(UnknownGroup, match=r"no rank has the groups swa; there are: full"):
        harness.hub.start_sweep(StartSweepRequest(groups=("full", "swa")))
    harness.now += 6
    with pytest.raises(NoEngine, match=r"latest snapshot is 6\.0 s old"):
        harness.hub.start_sweep(StartSweepRequest())


def test_sweep_history_is_bounded_and_keeps_the_running_one(harness):
    me = harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    for number in range(400):
        done = progress(f"idle-{number}", SweepStatus.PASSED, trigger=Trigger.IDLE)
        harness.send(SweepReport(identity=me, progress=done))
    assert len(harness.hub.sweeps()) == 256
    assert harness.hub.sweep(record.id).status is SweepStatus.RUNNING


def test_a_future_resolves_for_another_thread(harness):
    me = harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    results = []
    waiter = threading.Thread(target=lambda: results.append(harness.hub.sweep_future(record.id).result(10)))
    waiter.start()
    harness.send(SweepReport(identity=me, progress=progress(record.id, SweepStatus.PASSED)))
    waiter.join(10)
    assert [result.status for result in results] == [SweepStatus.PASSED]


def test_a_cancelled_future_does_not_disturb_the_sweep(harness):
    me = harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    assert harness.hub.sweep_future(record.id).cancel()
    harness.send(SweepReport(identity=me, progress=progress(record.id, SweepStatus.PASSED)))
    assert harness.hub.sweep(record.id).status is SweepStatus.PASSED


# Commands and violations.


def test_pause_and_resume_reach_live_ranks(harness):
    with pytest.raises(NoEngine):
        harness.hub.pause()
    harness.attach(0)
    harness.attach(1)
    keys = (("fake", "test", 0), ("fake", "test", 1))
    assert harness.hub.pause() == harness.hub.resume() == keys
    assert harness.received(Resume, 1) == [Resume()]


def test_pause_by_rank_reaches_no_other(harness):
    for number in range(3):
        harness.attach(number)
    assert harness.hub.pause(RankSelection(ranks=(2, 0))) == (("fake", "test", 0), ("fake", "test", 2))
    assert [len(harness.received(Pause, number)) for number in range(3)] == [1, 0, 1]
    for nobody in (RankSelection(ranks=(0, 7)), RankSelection(instance="other"), RankSelection(engine="x")):
        with pytest.raises(UnknownRank, match="there are: fake/test/0, fake/test/1, fake/test/2"):
            harness.hub.pause(nobody)
    harness.now += 6
    with pytest.raises(NoEngine):
        harness.hub.pause(RankSelection(ranks=(1,)))


def test_violations_are_numbered_bounded_and_filtered():
    harness = Harness(violations_kept=3)
    me, other = harness.attach(0), harness.attach(1)
    seen = []
    harness.hub.subscribe(seen.extend)
    harness.send(Violations(identity=me, rows=(violation(1), violation(2))))
    harness.send(Violations(identity=other, rows=(violation(3, reason=Reason.CHAIN), violation(4))))
    assert [event.number for event in harness.hub.violations()] == [4, 3, 2]
    assert harness.hub.counts().evicted == 1
    assert [event.violation.slot for event in seen] == [1, 2, 3, 4]

    def slots(**wanted):
        return [event.violation.slot for event in harness.hub.violations(ViolationFilter(**wanted))]

    assert slots(reason=Reason.CHAIN) == [3]
    assert slots(rank=0) == [2]
    assert slots(after=3) == [4]
    assert slots(before=4, phase=Phase.SWEEP, group="full") == [3, 2]
    assert slots(group="swa") == []


def test_ranks_are_bounded_and_the_longest_silent_is_evicted(harness):
    for number in range(1100):
        harness.now += 0.01  # silent after 5 s
        harness.send(hello(identity(number)))
    ranks = harness.hub.ranks()
    assert len(ranks) == 1024
    assert min(rank.identity.rank for rank in ranks) == 76


# A step under way.


def under_way(seconds):
    return StepUnderWay(identity=identity(), seconds=seconds)


def last(harness, step_seconds, *, reports=True):
    """A step lasts so long; a rank that lives reports it twice a second."""
    began = harness.now
    while harness.now - began < step_seconds:
        harness.now += 0.5
        if reports:
            harness.send(under_way(harness.now - began))
        harness.hub.tick()


def test_a_long_step_leaves_the_state_as_it_was(harness):
    me = harness.attach()
    last(harness, 20.0)
    assert harness.hub.verdict() == (State.OK, ())
    (rank,) = harness.hub.ranks()
    assert (rank.step_seconds, rank.snapshot_age) == (20.0, 20.0)
    harness.send(harness.snapshot(me))
    assert harness.hub.verdict() == (State.OK, ())
    assert harness.hub.ranks()[0].step_seconds is None


def test_a_sweep_outlasts_a_long_step(harness):
    harness.attach()
    record = harness.hub.start_sweep(StartSweepRequest())
    last(harness, 20.0)
    assert harness.hub.sweep(record.id).status is SweepStatus.RUNNING
    assert len(harness.hub.pause()) == 1


def test_an_engine_killed_in_a_long_step_is_noticed_as_soon_as_any_other(harness):
    harness.attach()
    last(harness, 20.0)
    harness.now += 4.9
    assert harness.hub.verdict()[0] is State.OK
    harness.now += 0.2
    state, reasons = harness.hub.verdict()
    assert state is State.BLIND
    assert reasons[0].startswith("fake/test/0: latest snapshot is 25.1 s old")
    assert harness.hub.ranks()[0].step_seconds is None


def test_a_step_that_does_not_end_is_blind(harness):
    harness.attach()
    last(harness, 120.0)
    assert harness.hub.verdict()[0] is State.OK
    last_state = harness.hub.verdict()
    harness.now += 0.5
    harness.send(under_way(120.5))
    state, reasons = harness.hub.verdict()
    assert last_state[0] is State.OK
    assert state is State.BLIND
    assert "the engine's step has lasted 120 s" in reasons[0]


def test_a_step_excuses_nothing_after_a_restart(harness):
    harness.attach()
    last(harness, 3.0)
    me = identity(started_ns=5_000)
    harness.send(hello(me), harness.snapshot(me))
    harness.now += 5.1
    assert harness.hub.verdict()[0] is State.BLIND


def test_a_new_name_never_evicts_a_live_rank(monkeypatch):
    monkeypatch.setattr("canary_obs.hub.rank_table.RANKS_KEPT", 3)
    harness = Harness(snapshot_stale_seconds=5.0)
    ranks = [harness.attach(number) for number in range(3)]
    harness.attach(7)
    assert [view.identity.rank for view in harness.hub.ranks()] == [0, 1, 2]
    assert harness.hub.counts().refused > 0
    harness.now += 6.0
    harness.send(harness.snapshot(ranks[0]), harness.snapshot(ranks[2]))
    harness.attach(7)  # rank 1 is silent: it makes room
    assert [view.identity.rank for view in harness.hub.ranks()] == [0, 2, 7]


def test_a_sweep_that_an_engine_calls_demanded_does_not_block_operators():
    harness = Harness()
    me = harness.attach()
    running = progress("not-ours", SweepStatus.RUNNING, trigger=Trigger.DEMAND)
    harness.send(SweepReport(identity=me, progress=running))
    record = harness.hub.start_sweep(StartSweepRequest())
    with pytest.raises(SweepInProgress, match=record.id):
        harness.hub.start_sweep(StartSweepRequest())
