from __future__ import annotations

import pytest

from canary_obs.hub.sweeps import RECORDS_KEPT
from canary_obs.records import SweepReport, Violations
from canary_obs.service.event_stream import EVENTS_KEPT, POLL_SECONDS, Dropped, EventKind, EventStream
from canary_obs.vocabulary import State, SweepStatus, Trigger
from tests.service.fakes import progress, snapshot, violation


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += POLL_SECONDS
        return self.now


@pytest.fixture
def event_stream(hub):
    event_stream = EventStream(hub, Clock())
    hub.subscribe(event_stream)
    return event_stream


def kinds(events):
    return [event.kind for event in events]


def test_each_change_is_published_once(event_stream, hub, rank):
    event_stream.poll()
    assert [(one.data.before, one.data.state) for one in event_stream.after(0)] == [(None, "ok")] * 2
    assert event_stream.after(0)[0].data.identity is None
    assert event_stream.after(0)[1].data.identity == rank.identity
    start = event_stream.last_number
    event_stream.poll()
    assert event_stream.after(start) == []
    rank.send(Violations(identity=rank.identity, rows=(violation(7),)))
    rank.send(snapshot(rank.identity, 2, violations=1))
    rank.finishes = False
    event_stream.poll()
    published = event_stream.after(start)
    assert kinds(published) == ["violation", "incident_opened", "state", "state"]
    assert published[0].data.violation.slot == 7
    assert published[0].data.incident == published[1].data.id
    assert (published[2].data.before, published[2].data.state) == (State.OK, State.VIOLATED)
    hub.acknowledge()
    event_stream.poll()
    assert kinds(event_stream.after(published[-1].number)) == ["incident_closed"]
    assert [event.number for event in event_stream.after(0)] == list(range(1, event_stream.last_number + 1))


def test_sweeps_begin_and_end_and_end_again_when_a_rank_joins_late(event_stream, rank):
    event_stream.poll()
    start = event_stream.last_number

    def report(status, **changes):
        part = progress("s", status, trigger=Trigger.INTERVAL)
        rank.send(SweepReport(identity=changes.get("who", rank.identity), progress=part))
        event_stream.poll()

    report(SweepStatus.RUNNING)
    assert kinds(event_stream.after(start)) == ["sweep_begun"]
    report(SweepStatus.PASSED)
    ended = event_stream.after(start)[-1]
    assert (ended.kind, ended.data.id, ended.data.status) == (EventKind.SWEEP_ENDED, "s", SweepStatus.PASSED)
    event_stream.poll()
    assert event_stream.after(ended.number) == []


def test_a_poll_right_after_another_does_nothing(hub, rank):
    clock = Clock()
    event_stream = EventStream(hub, lambda: clock.now)
    event_stream.poll()
    rank.send(snapshot(rank.identity, 2, violations=1))
    clock.now = POLL_SECONDS * 0.4
    event_stream.poll()
    assert event_stream.last_number == 2
    clock.now = POLL_SECONDS * 0.6
    event_stream.poll()
    assert event_stream.last_number == 4


def test_a_flood_of_violations_drops_no_other_events_and_counts_its_losses(event_stream, rank):
    event_stream.poll()
    rank.send(
        Violations(identity=rank.identity, rows=tuple(violation(slot) for slot in range(EVENTS_KEPT + 100)))
    )
    event_stream.poll()
    published = event_stream.after(0)
    assert published[0].data == Dropped(count=100)
    assert published[0].number == 0
    assert kinds(published[1:3]) == ["state", "state"]
    assert kinds(published).count("violation") == EVENTS_KEPT
    assert published[3].data.violation.slot == 100
    assert kinds(published)[-1] == "incident_opened"
    place = published[10].number
    assert event_stream.after(place) == published[11:]
    assert event_stream.after(event_stream.last_number) == []


def test_ended_sweeps_are_not_read_again(event_stream, hub, rank):
    for number in range(2 * RECORDS_KEPT + 40):
        rank.send(SweepReport(identity=rank.identity, progress=progress(f"s{number}", SweepStatus.PASSED)))
        event_stream.poll()
    published = kinds(event_stream.after(event_stream.last_number - 4 * RECORDS_KEPT))
    assert published == ["sweep_begun", "sweep_ended"] * (2 * RECORDS_KEPT)
    start = event_stream.last_number
    event_stream.poll()
    assert event_stream.after(start) == []
