"""Operators' sweeps: ranks, windows, deadlines, pause, rate and what outlives the service."""

from __future__ import annotations

import msgspec
import pytest

from canary_obs.hub.commands import NoEngine, StartSweepRequest
from canary_obs.hub.rank_selection import RankSelection, UnknownRank
from canary_obs.hub.sweep_control import SavedSweeps
from canary_obs.hub.sweep_window import SweepWindow
from canary_obs.hub.sweeps import SweepInProgress
from canary_obs.records import CancelSweep, PauseSweep, ResumeSweep, StartSweep, SweepReport
from canary_obs.vocabulary import Cause, SweepStatus
from tests.hub.harness import Harness
from tests.service.fakes import hello, progress

HOUR_NS = 3600 * 10**9
NIGHT = "22:00-05:30"


def start(harness, **wanted):
    return harness.hub.start_sweep(StartSweepRequest(**wanted))


def report(harness, me, sweep_id, status=SweepStatus.RUNNING, **changes):
    harness.send(SweepReport(identity=me, progress=progress(sweep_id, status, **changes)))


def clock(text: str) -> int:
    hours, minutes = map(int, text.split(":"))
    return 20_000 * 24 * HOUR_NS + hours * HOUR_NS + minutes * HOUR_NS // 60


def test_what_is_asked_for_reaches_the_named_ranks_only(harness):
    for number in range(3):
        harness.attach(number)
    record = start(
        harness, selection=RankSelection(ranks=(1, 2)), groups=("full",), data=False, used_only=True,
        request="r1", first_slot=4, last_slot=9, budget_ms=0.5,
    )  # fmt: skip
    assert [rank.key[2] for rank in record.ranks] == [1, 2]
    assert harness.received(StartSweep, 0) == []
    assert harness.received(StartSweep, 1) == [
        StartSweep(
            id=record.id, groups=("full",), data=False, used_only=True, request="r1", first_slot=4,
            last_slot=9, budget_ms=0.5,
        )
    ]  # fmt: skip
    with pytest.raises(UnknownRank):
        start(harness, selection=RankSelection(ranks=(9,)))


def test_sweeps_of_different_ranks_run_at_once(harness):
    for number in range(2):
        harness.attach(number)
    first = start(harness, selection=RankSelection(ranks=(0,)))
    start(harness, selection=RankSelection(ranks=(1,)))
    with pytest.raises(SweepInProgress, match=first.id):
        start(harness, selection=RankSelection(ranks=(0,)))


def test_ranks_that_cannot_be_asked_fail_their_part(harness):
    me = harness.attach(0)
    harness.send(msgspec.structs.replace(hello(me), expected_ranks=(0, 1, 2)))
    harness.attach(1)
    harness.now += 6
    harness.send(harness.snapshot(me))
    record = start(harness)
    parts = {rank.key[2]: (rank.status, rank.error) for rank in record.ranks}
    assert parts == {
        0: (SweepStatus.RUNNING, None),
        1: (SweepStatus.FAILED, "the rank is silent"),
        2: (SweepStatus.FAILED, "no word of this rank, which its engine has"),
    }
    report(harness, me, record.id, SweepStatus.PASSED, checked=100)
    ended = harness.hub.sweep(record.id)
    assert ended.status is SweepStatus.FAILED
    assert ended.ranks_by_status == {SweepStatus.PASSED: 1, SweepStatus.FAILED: 2}


def test_rate_and_remaining_time_are_those_of_late(harness):
    me = harness.attach()
    record = start(harness)
    assert (record.slots_per_second, record.eta_seconds) == (None, None)
    for checked in (0, 10, 20, 30):
        report(harness, me, record.id, total=100, checked=checked)
        harness.now += 1
    seen = harness.hub.sweep(record.id)
    assert (seen.total, seen.checked, seen.slots_per_second, seen.eta_seconds) == (100, 30, 10.0, 7.0)
    skipped = dict.fromkeys(Cause, 0) | {Cause.EVICTED: 20}
    report(harness, me, record.id, total=100, checked=30, skipped=skipped)
    assert harness.hub.sweep(record.id).eta_seconds == pytest.approx(50 / 12.5)
    report(harness, me, record.id, total=100, checked=30, paused=True)
    assert harness.hub.sweep(record.id).slots_per_second is None
    report(harness, me, record.id, SweepStatus.PASSED, total=100, checked=100)
    assert harness.hub.sweep(record.id).eta_seconds is None


def test_the_remaining_time_of_a_rank_that_does_not_report_is_unknown(harness):
    me, _ = harness.attach(0), harness.attach(1)
    record = start(harness)
    for checked in (0, 10):
        report(harness, me, record.id, checked=checked)
        harness.now += 1
    seen = harness.hub.sweep(record.id)
    assert seen.ranks[0].eta_seconds is not None
    assert seen.eta_seconds is None


def test_one_sweep_is_paused_resumed_and_does_not_time_out():
    harness = Harness(snapshot_stale_seconds=600.0)
    me = harness.attach()
    record = start(harness)
    assert harness.hub.sweep_control.hold(record.id, paused=True).paused
    harness.hub.sweep_control.hold(record.id, paused=True)
    assert harness.received(PauseSweep) == [PauseSweep(id=record.id)]
    for _ in range(10):
        report(harness, me, record.id, checked=5, paused=True)
        harness.now += 60
        harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.RUNNING
    assert not harness.hub.sweep_control.hold(record.id, paused=False).paused
    assert harness.received(ResumeSweep) == [ResumeSweep(id=record.id)]
    report(harness, me, record.id, SweepStatus.PASSED)
    assert not harness.hub.sweep_control.hold(record.id, paused=True).paused  # it has ended
    assert harness.hub.sweep_control.hold("unknown", paused=True) is None


def test_a_deadline_fails_the_ranks_that_are_not_done(harness):
    fast, slow = harness.attach(0), harness.attach(1)
    record = start(harness, deadline_seconds=3.0)
    report(harness, fast, record.id, SweepStatus.PASSED, checked=100)
    report(harness, slow, record.id, checked=40)
    harness.now += 2.9
    harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.RUNNING
    harness.now += 0.2
    harness.hub.tick()
    ended = harness.hub.sweep(record.id)
    assert [rank.status for rank in ended.ranks] == [SweepStatus.PASSED, SweepStatus.FAILED]
    assert (ended.status, ended.error) == (SweepStatus.FAILED, "not done after 3 s")
    assert harness.received(CancelSweep, 1) == [CancelSweep(id=record.id)]
    assert harness.received(CancelSweep, 0) == []


@pytest.mark.parametrize(
    ("window", "open_at", "closed_at"),
    [
        (NIGHT, ("22:00", "23:59", "00:00", "05:29"), ("21:59", "05:30", "12:00")),
        ("09:00-10:00", ("09:00", "09:59"), ("08:59", "10:00", "23:00")),
        ("07:00-07:00", ("00:00", "07:00", "23:59"), ()),
    ],
)
def test_a_window_may_pass_midnight(window, open_at, closed_at):
    hours = SweepWindow.parse(window)
    assert all(hours.contains(clock(time)) for time in open_at)
    assert not any(hours.contains(clock(time)) for time in closed_at)


def test_a_window_opens_on_the_minute():
    hours = SweepWindow.parse(NIGHT)
    assert hours.opens_ns(clock("21:00") + 999) == clock("22:00")
    assert hours.opens_ns(clock("23:30") + 999) == clock("23:30") + 999
    with pytest.raises(ValueError, match="HH:MM-HH:MM"):
        SweepWindow.parse("22-05")


def test_a_sweep_waits_for_its_window_and_ends_with_it(harness):
    harness.wall = clock("21:59")
    me = harness.attach()
    record = start(harness, window=NIGHT)
    assert (record.status, record.begins_ns, record.ranks) == (SweepStatus.SCHEDULED, clock("22:00"), ())
    assert harness.received(StartSweep) == []
    other = start(harness)  # one that waits blocks nobody
    harness.wall = clock("22:00")
    harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.SCHEDULED  # the other one runs
    report(harness, me, other.id, SweepStatus.PASSED)
    harness.hub.tick()
    begun = harness.hub.sweep(record.id)
    assert (begun.status, begun.begun_ns, begun.begins_ns) == (SweepStatus.RUNNING, clock("22:00"), None)
    report(harness, me, record.id, checked=7)
    harness.wall = clock("05:30") + 24 * HOUR_NS
    harness.hub.tick()
    ended = harness.hub.sweep(record.id)
    assert (ended.status, ended.checked) == (SweepStatus.CANCELLED, 7)
    assert ended.error == "its window 22:00-05:30 UTC has closed"
    assert harness.received(CancelSweep) == [CancelSweep(id=record.id)]


def test_a_sweep_that_waits_can_be_held_and_cancelled(harness):
    harness.wall = clock("21:00")
    harness.attach()
    record = start(harness, window=NIGHT)
    harness.hub.sweep_control.hold(record.id, paused=True)
    harness.wall = clock("23:00")
    harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.SCHEDULED
    future = harness.hub.sweep_future(record.id)
    ended = harness.hub.sweep_control.cancel(record.id)
    assert (ended.status, ended.error) == (SweepStatus.CANCELLED, "cancelled before its window opened")
    assert future.result(0).ended_ns is not None
    harness.hub.tick()
    assert harness.received(StartSweep) == []


def restarted(harness, **settings):
    """Another service, which has what the first one saved, as a file would."""
    content = msgspec.json.encode(harness.hub.sweep_control.saved())
    new = Harness(**settings)
    new.now, new.wall = harness.now + 1000, harness.wall + 10 * 10**9
    new.hub.restore_sweeps(msgspec.json.decode(content, type=SavedSweeps))
    return new


def test_a_running_sweep_goes_on_after_a_restart_of_the_service(harness):
    me = harness.attach()
    ended = start(harness)
    report(harness, me, ended.id, SweepStatus.VIOLATED, checked=100, violations=2)
    running = start(harness, deadline_seconds=60.0)
    report(harness, me, running.id, checked=10)
    new = restarted(harness, snapshot_stale_seconds=600.0)
    assert new.hub.sweep(ended.id) == harness.hub.sweep(ended.id)
    new.send(hello(me), new.snapshot(me))
    with pytest.raises(SweepInProgress, match=running.id):
        start(new)
    report(new, me, running.id, checked=50)
    assert (new.hub.sweep(running.id).status, new.hub.sweep(running.id).checked) == (SweepStatus.RUNNING, 50)
    new.now += 49  # of the 60 s, 10 passed without a service
    new.hub.tick()
    assert new.hub.sweep(running.id).status is SweepStatus.RUNNING
    new.now += 2
    new.hub.tick()
    assert new.hub.sweep(running.id).error == "not done after 60 s"


def test_a_scheduled_sweep_and_its_key_outlive_the_service(harness):
    harness.wall = clock("21:00")
    me = harness.attach()
    record = start(harness, window=NIGHT)
    harness.hub.sweep_control.remember_key("k", record.request, record.id)
    new = restarted(harness)
    assert new.hub.sweep_control.idempotent("k") == (record.request, record)
    assert new.hub.sweep_control.idempotent("other") is None
    new.send(hello(me), new.snapshot(me))
    new.wall = clock("22:00")
    new.hub.tick()
    assert new.sweep_id() == record.id


def test_without_an_engine_a_sweep_waits_in_its_window(harness):
    with pytest.raises(NoEngine):
        start(harness, window=NIGHT)
    harness.wall = clock("21:00")
    me = harness.attach()
    record = start(harness, window=NIGHT)
    harness.wall, harness.now = clock("22:00"), harness.now + 6
    harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.SCHEDULED
    harness.send(harness.snapshot(me))
    harness.hub.tick()
    assert harness.hub.sweep(record.id).status is SweepStatus.RUNNING


def test_only_operators_sweeps_are_saved(harness):
    me = harness.attach()
    report(harness, me, "idle-1", SweepStatus.PASSED)
    assert harness.hub.sweep_control.saved().sweeps == ()
    revision = harness.hub.sweep_control.revision
    record = start(harness)
    assert harness.hub.sweep_control.revision != revision
    assert [saved.id for saved in harness.hub.sweep_control.saved().sweeps] == [record.id]
