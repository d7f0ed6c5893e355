"""Acknowledgements by incident and by rank, and taking them back."""

from __future__ import annotations

import pytest

from canary_obs.hub.acknowledgements import AcknowledgeRequest, UnknownIncident
from canary_obs.hub.rank_selection import RankSelection, UnknownRank
from canary_obs.hub.row_account import RowAccount
from canary_obs.records import Acknowledge, Goodbye, Violations
from canary_obs.vocabulary import State
from tests.service.fakes import violation


def damage(harness, me, *, so_far):
    """One more violation of a rank, which has found `so_far` with it; the id of its incident."""
    harness.send(Violations(identity=me, rows=(violation(so_far),)))
    harness.send(harness.snapshot(me, violations=so_far))
    return harness.hub.incidents.newest_first()[0].id


def quiet(harness):
    harness.now += 100
    harness.hub.tick()


def sent(harness, rank=0):
    return harness.received(Acknowledge, rank)


def acknowledge(harness, **wanted):
    return harness.hub.acknowledge(AcknowledgeRequest(**wanted))


def test_one_of_two_incidents_is_acknowledged_and_the_other_stays(harness):
    me = harness.attach()
    first = damage(harness, me, so_far=1)
    quiet(harness)
    second = damage(harness, me, so_far=2)
    assert first != second
    record = acknowledge(harness, incident=second, by="ada", comment="known bug")
    assert record.incidents == {second: (0,)}
    assert sent(harness) == [Acknowledge(violations=1, violations_only=True)]
    newest, oldest = harness.hub.incidents.newest_first()
    assert (newest.acknowledged, oldest.acknowledged) == (True, False)
    (seen,) = newest.acknowledgements
    assert (seen.id, seen.by, seen.comment, seen.ranks) == (record.id, "ada", "known bug", (0,))
    acknowledge(harness, incident=first)
    assert sent(harness)[-1] == Acknowledge(violations=2, violations_only=True)


def test_an_acknowledged_incident_is_closed_and_new_damage_opens_another(harness):
    me = harness.attach()
    first = damage(harness, me, so_far=1)
    acknowledge(harness, incident=first)
    assert harness.hub.incidents.find(first).closed_ns is not None
    assert damage(harness, me, so_far=2) != first


def test_an_incident_does_not_clear_another_engine(harness):
    here, there = harness.attach(0), harness.attach(1, instance="other")
    incident = damage(harness, here, so_far=1)
    other = damage(harness, there, so_far=1)
    acknowledge(harness, incident=incident)
    assert sent(harness) == [Acknowledge(violations=1, violations_only=True)]
    assert not [command for command in harness.commands[there.key] if isinstance(command, Acknowledge)]
    assert not harness.hub.incidents.find(other).acknowledged


def test_by_rank_an_incident_is_acknowledged_once_all_of_its_ranks_are(harness):
    one, other = harness.attach(0), harness.attach(1)
    incident = damage(harness, one, so_far=1)
    damage(harness, other, so_far=1)
    record = acknowledge(harness, selection=RankSelection(ranks=(1,)))
    assert record.incidents == {incident: (1,)}
    assert (sent(harness, 0), [seen.violations for seen in sent(harness, 1)]) == ([], [1])
    assert not harness.hub.incidents.find(incident).acknowledged
    assert harness.hub.incidents.find(incident).acknowledged_ranks == (1,)
    damage(harness, other, so_far=2)  # the rank has something new to show
    acknowledge(harness, selection=RankSelection(ranks=(0,)))
    assert not harness.hub.incidents.find(incident).acknowledged
    acknowledge(harness, incident=incident, selection=RankSelection(ranks=(1,)))
    assert harness.hub.incidents.find(incident).acknowledged


def test_up_to_keeps_an_incident_with_later_violations(harness):
    me = harness.attach()
    incident = damage(harness, me, so_far=1)
    damage(harness, me, so_far=2)
    assert acknowledge(harness, incident=incident, up_to=1).incidents == {}
    assert sent(harness) == []
    assert acknowledge(harness, incident=incident, up_to=2).incidents == {incident: (0,)}


@pytest.mark.parametrize("by_incident", [True, False])
def test_an_acknowledgement_is_undone_once(harness, by_incident):
    me = harness.attach()
    incident = damage(harness, me, so_far=1)
    record = acknowledge(harness, incident=incident) if by_incident else acknowledge(harness)
    undone = harness.hub.acknowledgements.undo(record.id)
    assert undone.undone_ns is not None
    assert sent(harness)[-1] == Acknowledge(violations=0, violations_only=True, undo=True)
    found = harness.hub.incidents.find(incident)
    assert not found.acknowledged
    assert [seen.undone_ns for seen in found.acknowledgements] == [undone.undone_ns]
    assert harness.hub.acknowledgements.undo(record.id) == undone
    assert len(sent(harness)) == 2
    assert harness.hub.acknowledgements.undo("unknown") is None
    assert acknowledge(harness, incident=incident).incidents == {incident: (0,)}


def test_undoing_one_leaves_what_another_acknowledged(harness):
    me = harness.attach()
    first = acknowledge(harness, incident=damage(harness, me, so_far=1))
    acknowledge(harness, incident=damage(harness, me, so_far=2))
    harness.hub.acknowledgements.undo(first.id)
    assert sent(harness)[-1].violations == 1


def test_damage_of_an_ended_process_is_acknowledged_by_its_incident(harness):
    me = harness.attach(started_ns=1_000)
    first = damage(harness, me, so_far=1)
    quiet(harness)
    second = damage(harness, me, so_far=2)
    harness.attach(started_ns=2_000)
    assert harness.hub.verdict()[1][0].startswith("fake/test/0: 2 violations of process 7, which has ended")
    acknowledge(harness, incident=first)
    assert harness.hub.verdict()[1][0].startswith("fake/test/0: 1 violation of process 7, which has ended")
    acknowledge(harness, incident=second)
    assert harness.hub.verdict() == (State.OK, ())


def test_a_detached_rank_stays_violated_until_its_last_incident_is_acknowledged(harness):
    me = harness.attach()
    first = damage(harness, me, so_far=1)
    quiet(harness)
    second = damage(harness, me, so_far=2)
    harness.send(Goodbye(identity=me, final=harness.snapshot(me, violations=2)))
    acknowledge(harness, incident=second)
    assert harness.hub.verdict()[0] is State.VIOLATED
    acknowledge(harness, incident=first)
    assert harness.hub.verdict()[0] is State.OFF


def test_an_incident_clears_no_faults_and_dismisses_no_silent_rank(harness):
    me = harness.attach(0)
    harness.attach(1)
    incident = damage(harness, me, so_far=1)
    harness.hub.fault("listener", RuntimeError("injected"))
    harness.now += 6
    acknowledge(harness, incident=incident)
    assert any("injected" in reason for reason in harness.hub.verdict()[1])
    assert not any(rank.departed for rank in harness.hub.ranks())


def test_some_ranks_clear_no_fault_of_the_service(harness):
    harness.attach()
    harness.hub.fault("listener", RuntimeError("injected"))
    acknowledge(harness, selection=RankSelection(ranks=(0,)))
    assert harness.hub.verdict()[0] is State.BLIND


def test_what_is_not_known_is_refused(harness):
    harness.attach()
    with pytest.raises(UnknownIncident, match="no incident 'nothing'"):
        acknowledge(harness, incident="nothing")
    with pytest.raises(UnknownRank, match="rank 7 of engine fake"):
        acknowledge(harness, selection=RankSelection(engine="fake", ranks=(7,)))


def test_records_are_bounded(harness):
    for _ in range(300):
        harness.hub.acknowledge()
    assert len(harness.hub.acknowledgements.newest_first()) == 256


def test_rows_of_many_incidents_are_bounded_and_none_is_lost():
    account = RowAccount()
    for number in range(1000):
        account.file(f"incident-{number}", 2)
    assert len(account.unseen) <= 257
    assert account.unseen.total() == 2000
    account.acknowledge({})
    assert (account.unseen.total(), account.seen.total()) == (0, 2000)
    assert len(account.seen) <= 257
