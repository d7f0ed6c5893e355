from __future__ import annotations

import pytest

from canary_obs.hub.sweeps import RECORDS_KEPT
from canary_obs.records import State, SweepReport, SweepStatus, Trigger, Violations
from canary_obs.service.event_stream import EVENTS_KEPT, LOOK_SECONDS, Dropped, Feed, FeedKind
from tests.service.fakes import progress, snapshot, violation


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_SECONDS
        return self.now


@pytest.fixture
def feed(hub):
    feed = Feed(hub, Clock())
    hub.subscribe(feed)
    return feed


def kinds(events):
    return [event.kind for event in events]


def test_what_changes_is_told_once(feed, hub, rank):
    feed.look()
    assert [(one.data.before, one.data.state) for one in feed.after(0)] == [(None, "ok")] * 2
    assert feed.after(0)[0].data.identity is None
    assert feed.after(0)[1].data.identity == rank.who
    start = feed.last
    feed.look()
    assert feed.after(start) == []
    rank.say(Violations(identity=rank.who, rows=(violation(7),)))
    rank.say(snapshot(rank.who, 2, violations=1))
    rank.finishes = False
    feed.look()
    told = feed.after(start)
    assert kinds(told) == ["violation", "incident_opened", "state", "state"]
    assert told[0].data.violation.slot == 7
    assert told[0].data.incident == told[1].data.id
    assert (told[2].data.before, told[2].data.state) == (State.OK, State.VIOLATED)
    hub.acknowledge()
    feed.look()
    assert kinds(feed.after(told[-1].number)) == ["incident_closed"]
    assert [event.number for event in feed.after(0)] == list(range(1, feed.last + 1))


def test_sweeps_begin_and_end_and_end_again_when_a_rank_joins_late(feed, rank):
    feed.look()
    start = feed.last

    def report(status, **changes):
        part = progress("s", status, trigger=Trigger.INTERVAL)
        rank.say(SweepReport(identity=changes.get("who", rank.who), progress=part))
        feed.look()

    report(SweepStatus.RUNNING)
    assert kinds(feed.after(start)) == ["sweep_begun"]
    report(SweepStatus.PASSED)
    ended = feed.after(start)[-1]
    assert (ended.kind, ended.data.id, ended.data.status) == (FeedKind.SWEEP_ENDED, "s", SweepStatus.PASSED)
    feed.look()
    assert feed.after(ended.number) == []


def test_a_look_right_after_another_costs_nothing(hub, rank):
    clock = Clock()
    feed = Feed(hub, lambda: clock.now)
    feed.look()
    rank.say(snapshot(rank.who, 2, violations=1))
    clock.now = LOOK_SECONDS * 0.4
    feed.look()
    assert feed.last == 2
    clock.now = LOOK_SECONDS * 0.6
    feed.look()
    assert feed.last == 4


def test_a_flood_of_violations_hides_nothing_else_and_what_is_lost_is_counted(feed, rank):
    feed.look()
    rank.say(Violations(identity=rank.who, rows=tuple(violation(slot) for slot in range(EVENTS_KEPT + 100))))
    feed.look()
    told = feed.after(0)
    assert told[0].data == Dropped(count=100)
    assert told[0].number == 0
    assert kinds(told[1:3]) == ["state", "state"]
    assert kinds(told).count("violation") == EVENTS_KEPT
    assert told[3].data.violation.slot == 100
    assert kinds(told)[-1] == "incident_opened"
    place = told[10].number
    assert feed.after(place) == told[11:]
    assert feed.after(feed.last) == []


def test_ended_sweeps_are_not_looked_through_again(feed, hub, rank):
    for number in range(2 * RECORDS_KEPT + 40):
        rank.say(SweepReport(identity=rank.who, progress=progress(f"s{number}", SweepStatus.PASSED)))
        feed.look()
    told = kinds(feed.after(feed.last - 4 * RECORDS_KEPT))
    assert told == ["sweep_begun", "sweep_ended"] * (2 * RECORDS_KEPT)
    start = feed.last
    feed.look()
    assert feed.after(start) == []
