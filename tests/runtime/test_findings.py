"""One fault, one story: damage that stays is sent, logged and counted once, however often it is met."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from canary_obs.records import Acknowledge, Hello, Ping, Violation, Violations
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.report.incident_namer import QUIET_SECONDS, IncidentNamer
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Phase, Reason, State
from tests.links import OneThreadLink

PATROLLED = {"patrol_budget": "50%", "idle_sweep": False, "busy_sweep": False, "reuse_data": False}


@pytest.fixture
def link() -> LocalLink:
    return OneThreadLink(capacity=100_000)


def messages(link: LocalLink) -> list[object]:
    found = []
    while (message := link.next_message(0.0)) is not None:
        found.append(message)
    return found


def rows(link: LocalLink) -> list[Violation]:
    return [row for message in messages(link) if isinstance(message, Violations) for row in message.rows]


def patrol(rig, cycles: int = 5) -> None:
    end = rig.canary.patrol.cycles + cycles
    while rig.canary.patrol.cycles < end:
        rig.canary.idle()


def damage(rig, number: int) -> int:
    """Flip a bit in every byte source of a cached slot; returns the slot."""
    slot = int(rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[number])
    for source in rig.canary.state.groups[0].view.sources:
        locate_byte(source, slot, 3).flip(1)
    return slot


@pytest.fixture
def rig(make_rig, link):
    made = make_rig(link=link, **PATROLLED)
    made.run(100)
    made.finish_requests()
    messages(link)
    return made


def test_damage_that_stays_is_sent_logged_and_counted_once(rig, link, caplog) -> None:
    slot = damage(rig, 7)
    with caplog.at_level(logging.WARNING, "canary_obs"):
        patrol(rig)
    first = rows(link)
    assert {row.slot for row in first} == {slot}
    assert not any(row.redetection for row in first)
    assert sum("KV cache violation" in line for line in caplog.messages) == len(first)
    patrol(rig)
    assert rows(link) == []
    rig.canary.check_everything()  # a sweep meets it as well
    assert rows(link) == []
    counters = rig.canary.detach().groups["full"]
    assert counters.violations[Phase.PATROL][Reason.KV_DATA] == len(first)
    assert counters.violations[Phase.SWEEP][Reason.KV_DATA] == 0
    assert counters.redetections[Reason.KV_DATA] >= 10 * len(first)


def test_what_was_acknowledged_does_not_come_back_and_new_damage_does(rig, link) -> None:
    damage(rig, 7)
    patrol(rig, 1)
    assert rig.canary.verdict()[0] is State.VIOLATED
    link.send_command(Acknowledge())
    patrol(rig)
    assert rig.canary.verdict() == (State.OK, ())
    rows(link)
    slot = damage(rig, 20)
    patrol(rig, 1)
    assert rig.canary.verdict()[0] is State.VIOLATED
    assert {row.slot for row in rows(link)} == {slot}


def test_a_slot_that_is_damaged_once_more_is_a_new_finding(rig, link) -> None:
    damage(rig, 7)
    patrol(rig, 1)
    first = rows(link)
    slot = first[0].slot
    locate_byte(rig.canary.state.groups[0].view.sources[0], slot, 5).flip(2)
    patrol(rig, 1)
    (again,) = rows(link)
    assert (again.slot, again.part) == (slot, first[0].part)
    assert again.actual not in {row.actual for row in first}


def test_a_service_that_starts_later_gets_what_is_not_acknowledged(rig, link) -> None:
    damage(rig, 7)
    patrol(rig, 1)
    first = rows(link)
    link.send_command(Ping(want_hello=True))
    rig.canary.idle()
    answer = [message for message in messages(link) if isinstance(message, Hello | Violations)]
    assert isinstance(answer[0], Hello)
    assert [row for message in answer[1:] for row in message.rows] == first
    link.send_command(Acknowledge())
    link.send_command(Ping(want_hello=True))
    rig.canary.idle()
    assert rows(link) == []


def test_rows_that_never_come_count_as_findings(rig, link, monkeypatch) -> None:
    """What a check has counted must not stay unsaid because its rows cannot be read."""
    reader = rig.canary.counter_reader
    monkeypatch.setattr(reader, "_read", lambda copies, step: [])
    damage(rig, 7)
    patrol(rig, 1)
    assert reader.violations > reader.log.events_read
    now = reader._alarmed_at
    assert reader.findings(now + 1.9) == 0
    assert reader.findings(now + 2.1) == reader.violations


def test_a_wrong_table_entry_is_one_finding_per_request_and_run(make_rig, link) -> None:
    """Every step of the request meets it in every one of its slots."""
    rig = make_rig(link=link, **PATROLLED)
    rig.engine.add_request(np.arange(40, dtype=np.int32) + 5, Sampling(max_tokens=60))
    for _ in range(5):
        rig.engine.step()
    messages(link)
    (request,) = rig.engine.scheduler.running
    table = rig.engine.runner.pool.req_to_token
    table[request.row, 4:12] = table[request.row, 20:28].clone()
    for _ in range(40):
        rig.engine.step()
    found = rows(link)
    assert [row.slots for row in found if row.reason is Reason.POSITION] == [8]
    assert len(found) <= 3  # and where the chain breaks
    assert len({row.step for row in found}) == 1
    counters = rig.canary.detach().groups["full"]
    assert sum(sum(reasons.values()) for reasons in counters.violations.values()) == len(found)
    assert counters.redetections[Reason.POSITION] >= 8 * 39


def test_the_log_and_the_message_name_the_same_incident(rig, link, caplog) -> None:
    damage(rig, 7)
    with caplog.at_level(logging.WARNING, "canary_obs"):
        patrol(rig, 1)
    sent = [message for message in messages(link) if isinstance(message, Violations)]
    (name,) = {name for message in sent for name in message.incidents}
    lines = [line for line in caplog.messages if "KV cache violation" in line]
    assert lines
    assert all(line.endswith(f", incident={name}") for line in lines)

    link.send_command(Acknowledge())
    rig.canary.idle()
    caplog.clear()
    damage(rig, 9)
    with caplog.at_level(logging.WARNING, "canary_obs"):
        patrol(rig, 1)
    sent = [message for message in messages(link) if isinstance(message, Violations)]
    assert sent[-1].incidents[0] == name
    assert f", incident={sent[-1].incidents[1]}" in caplog.messages[-1]


def test_damage_that_is_met_again_keeps_the_incident(rig, link) -> None:
    now = [100.0]
    names = rig.canary.reporter.incidents = IncidentNamer(lambda: now[0])
    damage(rig, 7)
    patrol(rig, 1)
    for _ in range(4):
        now[0] += QUIET_SECONDS - 1.0
        patrol(rig, 1)
    damage(rig, 9)
    patrol(rig, 1)
    assert len(names.names) == 1
