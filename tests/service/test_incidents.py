"""Incidents: grouping, limits, evidence, closing; over the API and offline."""

from __future__ import annotations

import json
import subprocess
import time

import msgspec
import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.hub.incidents import EVIDENCE_KEPT, EVIDENCE_PER_LABEL_SET
from canary_obs.records import CollectEvidence, Evidence, Violations
from canary_obs.slot_facts import ChangedWord, SlotEvent, SlotFacts
from canary_obs.telemetry.incident_bundle import IncidentBundle
from canary_obs.vocabulary import Part, Phase, Plane, Reason, SlotEventKind, SlotState
from tests import forked
from tests.service.conftest import FakeRank
from tests.service.fakes import hello, identity, violation
from tests.service.test_app import check_problem


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def facts(slot: int, *, found: str = "0x2") -> SlotFacts:
    return SlotFacts(
        slot=slot, state=SlotState.COMPLETE, position=2, recorded={Part.K: "0x1"}, found={Part.K: found}
    )


def evidence(command: CollectEvidence, **changes) -> Evidence:
    changed = ChangedWord(
        part=Part.K, layer=3, head=1, element=7, dtype="float16", word=9, original="0x01", current="0x03"
    )
    plain = Evidence(
        identity=identity(), incident=command.incident, group=command.group, step=6, time_ns=time.time_ns(),
        prompted=False, slot=facts(command.slot), changed=(changed,),
        neighbours=(facts(8, found="0x1"), facts(9)),
        history=(SlotEvent(kind=SlotEventKind.WRITTEN, step=4, requests=("r1", "r2")),),
        writes_known=True, holders=("r1",),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def damaged(rank: FakeRank, *slots: int, **changes) -> None:
    rank.send(Violations(identity=rank.identity, rows=tuple(violation(slot, **changes) for slot in slots)))


def evidence_requests(rank: FakeRank) -> list[CollectEvidence]:
    return [command for command in rank.received if isinstance(command, CollectEvidence)]


def test_a_burst_is_one_incident_until_no_violation_follows():
    clock = Clock()
    hub = Hub(ServiceConfig(incident_quiet_seconds=30.0, snapshot_stale_seconds=600.0), clock=clock)
    rank = FakeRank(hub)
    damaged(rank, 1)
    clock.now += 29
    hub.tick()
    damaged(rank, 2, 3)
    clock.now += 29
    hub.tick()
    (incident,) = hub.incidents.newest_first()
    assert (incident.violations, incident.closed_ns) == (3, None)
    assert {event.incident for event in hub.violations()} == {incident.id}
    clock.now += 2
    hub.tick()
    (closed,) = hub.incidents.newest_first()
    assert closed.closed_ns is not None
    assert not closed.acknowledged
    damaged(rank, 4)
    newest, older = hub.incidents.newest_first()
    assert (newest.violations, older.id) == (1, incident.id)
    assert newest.id != older.id
    assert newest.trace_id != older.trace_id
    assert hub.incidents.opened == 2


def test_instances_have_incidents_of_their_own_and_ranks_share_one(hub):
    first, second = FakeRank(hub), FakeRank(hub)
    second.identity = identity(rank=1)
    other = FakeRank(hub)
    other.identity = msgspec.structs.replace(identity(), instance="other")
    for rank in (first, second, other):
        damaged(rank, 1)
    theirs, ours = hub.incidents.newest_first()
    assert (ours.ranks, theirs.ranks) == ((0, 1), (0,))
    assert (ours.instance, theirs.instance) == ("test", "other")


def test_acknowledging_closes_it(hub, rank):
    damaged(rank, 1)
    hub.acknowledge()
    (incident,) = hub.incidents.newest_first()
    assert incident.acknowledged
    assert incident.closed_ns is not None
    damaged(rank, 1)
    assert len(hub.incidents.newest_first()) == 2


def test_evidence_is_requested_for_each_label_set_but_not_for_every_slot(hub, rank):
    damaged(rank, *range(50))
    assert [command.slot for command in evidence_requests(rank)] == list(range(EVIDENCE_PER_LABEL_SET))
    damaged(rank, 60, reason=Reason.CHAIN, phase=Phase.HEAD)
    damaged(rank, -1, reason=Reason.POSITION)
    assert [command.slot for command in evidence_requests(rank)][EVIDENCE_PER_LABEL_SET:] == [60]
    for number in range(40):
        damaged(rank, 100 + number, group=f"g{number}")
    assert len(evidence_requests(rank)) == EVIDENCE_KEPT
    assert len({command.incident for command in evidence_requests(rank)}) == 1


def test_only_requested_evidence_is_kept_and_only_once(hub, rank):
    damaged(rank, 3)
    (command,) = evidence_requests(rank)
    rank.send(evidence(command))
    rank.send(evidence(command))
    rank.send(evidence(CollectEvidence(incident=command.incident, group="full", slot=99)))
    rank.send(evidence(CollectEvidence(incident="no such", group="full", slot=3)))
    incident = hub.incidents.find(command.incident)
    assert [one.slot.slot for one in incident.evidence] == [3]


def test_memory_is_bounded():
    hub = Hub(ServiceConfig(incidents_kept=2, snapshot_stale_seconds=600.0))
    rank = FakeRank(hub)
    ids = []
    for _ in range(4):
        damaged(rank, *range(1000))
        ids.append(hub.incidents.newest_first()[0].id)
        hub.acknowledge()
    assert [incident.id for incident in hub.incidents.newest_first()] == ids[:1:-1]
    assert hub.incidents.find(ids[0]) is None
    incident = hub.incidents.find(ids[3])
    assert incident.violations == 1000
    assert [event.violation.slot for event in incident.first] == list(range(16))
    assert [event.violation.slot for event in incident.latest] == list(range(984, 1000))
    # The oldest made room while it was still open.
    small = Hub(ServiceConfig(incidents_kept=1, snapshot_stale_seconds=600.0))
    first, second = FakeRank(small), FakeRank(small)
    second.identity = msgspec.structs.replace(identity(), instance="other")
    damaged(first, 1)
    damaged(second, 1)
    damaged(first, 2)
    assert [incident.instance for incident in small.incidents.newest_first()] == ["test"]


def test_the_api_lists_and_shows(client, hub, rank):
    assert client.get("/canary/incidents").json() == {"incidents": []}
    damaged(rank, 3, sweep_id="s1")
    (command,) = evidence_requests(rank)
    rank.send(evidence(command))
    rank.send(hello(rank.identity))
    (listed,) = client.get("/canary/incidents").json()["incidents"]
    assert (listed["id"], listed["violations"], listed["sweeps"]) == (command.incident, 1, ["s1"])
    answer = client.get(f"/canary/incidents/{listed['id']}")
    bundle = msgspec.json.decode(answer.content, type=IncidentBundle)
    assert bundle.incident.evidence[0].changed[0].layer == 3
    assert bundle.incident.first[0].violation.slot == 3
    assert [rank.identity.rank for rank in bundle.ranks] == [0]
    assert client.get("/canary/violations").json()["violations"][0]["incident"] == listed["id"]


def test_an_unknown_incident_is_404(client, rank):
    document = check_problem(client.get("/canary/incidents/nope"), 404, "no-such-incident")
    assert "GET /canary/incidents" in document["detail"]
    check_problem(client.get("/canary/incidents?limit=0"), 422, "invalid-request")


def show(path) -> subprocess.CompletedProcess[str]:
    return forked.run("canary_obs", "incident", "show", str(path), env={"COLUMNS": "200"}, seconds=60)


def test_a_saved_bundle_is_read_offline(client, hub, rank, tmp_path):
    damaged(rank, 3)
    (command,) = evidence_requests(rank)
    gone = ChangedWord(
        part=Part.V,
        plane=Plane.SCALES,
        layer=5,
        head=0,
        element=2,
        dtype="uint8",
        word=1,
        original=None,
        current=None,
    )
    rank.send(evidence(command, changed=(*evidence(command).changed, gone)))
    path = tmp_path / "incident.json"
    path.write_bytes(client.get(f"/canary/incidents/{command.incident}").content)
    shown = show(path)
    assert (shown.returncode, shown.stderr) == (0, "")
    for text in (
        f"Incident {command.incident}: 1 violation (kv_data 1)",
        "one word changed: k, layer 3, head 1, element 7 (float16): was 0x01, is 0x03, 1 bit changed",
        "one word changed: v scales, layer 5, head 0, element 2 (uint8); its values are gone",
        "neighbours: 2 read, damaged: 9",
        "written at step 4 (requests r1, r2)",
        "held by: r1",
        "canary_obs",
    ):
        assert text in shown.stdout, shown.stdout


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"format":"other/1"}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_a_bundle_is_refused(tmp_path, content):
    path = tmp_path / "incident.json"
    if content is not None:
        path.write_bytes(content)
    shown = show(path)
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: FILE=")
    assert "Traceback" not in shown.stderr


def test_a_bundle_holds_no_tokens(client, hub, rank):
    damaged(rank, 3)
    (command,) = evidence_requests(rank)
    rank.send(evidence(command))
    document = json.loads(client.get(f"/canary/incidents/{command.incident}").content)
    (evidence_sent,) = document["incident"]["evidence"]
    assert all(
        one["token"] is one["chain"] is None for one in (evidence_sent["slot"], *evidence_sent["neighbours"])
    )
