from __future__ import annotations

import pytest

from canary_obs.hub.sweeps import RECORDS_KEPT
from canary_obs.records import SweepReport, Violations
from canary_obs.service.event_stream import EVENTS_KEPT, LOOK_SECONDS, Dropped, EventStream, FeedKind
from canary_obs.vocabulary import State, SweepStatus, Trigger
from tests.service.fakes import progress, snapshot, violation


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_SECONDS
        return self.now


@pytest.fixture
def event_stream(hub):
    event_stream = EventStream(hub, Clock())
    hub.subscribe(event_stream)
    return event_stream


def kinds(events):
    return [event.kind for event in events]


def test_what_changes_is_told_once(event_stream, hub, rank):
    event_stream.look()
    assert [(one.data.before, one.data.state) for one in event_stream.after(0)] == [(None, "ok")] * 2
    assert event_stream.after(0)[0].data.identity is None
    assert event_stream.after(0)[1].data.identity == rank.who
    start = event_stream.last
    event_stream.look()
    assert event_stream.after(start) == []
    rank.say(Violations(identity=rank.who, rows=(violation(7),)))
    rank.say(snapshot(rank.who, 2, violations=1))
    rank.finishes = False
    event_stream.look()
    told = event_stream.after(start)
    assert kinds(told) == ["violation", "incident_opened", "state", "state"]
    assert told[0].data.violation.slot == 7
    assert told[0].data.incident == told[1].data.id
    assert (told[2].data.before, told[2].data.state) == (State.OK, State.VIOLATED)
    hub.acknowledge()
    event_stream.look()
    assert kinds(event_stream.after(told[-1].number)) == ["incident_closed"]
    assert [event.number for event in event_stream.after(0)] == list(range(1, event_stream.last + 1))


def test_sweeps_begin_and_end_and_end_again_when_a_rank_joins_late(event_stream, rank):
    event_stream.look()
    start = event_stream.last

    def report(status, **changes):
        part = progress("s", status, trigger=Trigger.INTERVAL)
        rank.say(SweepReport(identity=changes.get("who", rank.who), progress=part))
        event_stream.look()

    report(SweepStatus.RUNNING)
    assert kinds(event_stream.after(start)) == ["sweep_begun"]
    report(SweepStatus.PASSED)
    ended = event_stream.after(start)[-1]
    assert (ended.kind, ended.data.id, ended.data.status) == (FeedKind.SWEEP_ENDED, "s", SweepStatus.PASSED)
    event_stream.look()
    assert event_stream.after(ended.number) == []


def test_a_look_right_after_another_costs_nothing(hub, rank):
    clock = Clock()
    event_stream = EventStream(hub, lambda: clock.now)
    event_stream.look()
    rank.say(snapshot(rank.who, 2, violations=1))
    clock.now = LOOK_SECONDS * 0.4
    event_stream.look()
    assert event_stream.last == 2
    clock.now = LOOK_SECONDS * 0.6
    event_stream.look()
    assert event_stream.last == 4


def test_a_flood_of_violations_hides_nothing_else_and_what_is_lost_is_counted(event_stream, rank):
    event_stream.look()
    rank.say(Violations(identity=rank.who, rows=tuple(violation(slot) for slot in range(EVENTS_KEPT + 100))))
    event_stream.look()
    told = event_stream.after(0)
    assert told[0].data == Dropped(count=100)
    assert told[0].number == 0
    assert kinds(told[1:3]) == ["state", "state"]
    assert kinds(told).count("violation") == EVENTS_KEPT
    assert told[3].data.violation.slot == 100
    assert kinds(told)[-1] == "incident_opened"
    place = told[10].number
    assert event_stream.after(place) == told[11:]
    assert event_stream.after(event_stream.last) == []


def test_ended_sweeps_are_not_looked_through_again(event_stream, hub, rank):
    for number in range(2 * RECORDS_KEPT + 40):
        rank.say(SweepReport(identity=rank.who, progress=progress(f"s{number}", SweepStatus.PASSED)))
        event_stream.look()
    told = kinds(event_stream.after(event_stream.last - 4 * RECORDS_KEPT))
    assert told == ["sweep_begun", "sweep_ended"] * (2 * RECORDS_KEPT)
    start = event_stream.last
    event_stream.look()
    assert event_stream.after(start) == []
