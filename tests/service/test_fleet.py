"""What the overview shows: ranks worst first, coverage and age by group, sweeps with their ETA."""

from __future__ import annotations

import time

import msgspec
import pytest

from canary_obs.hub.commands import StartSweepRequest
from canary_obs.records import SweepReport, SweepShare, Violations
from canary_obs.service.fleet import SweepFollower, sweep_row
from canary_obs.vocabulary import State, SweepStatus, Trigger
from tests.service.conftest import FakeRank
from tests.service.fakes import FULL, hello, identity, progress, snapshot, violation


def join(hub, number, **changes):
    who = identity(number)
    hub.ingest(hello(who), lambda command: None)
    hub.ingest(snapshot(who, 1, **changes), lambda command: None)
    return who


def test_ranks_are_sorted_worst_first_with_their_reasons(client, hub):
    for number, state in enumerate([State.OK, State.BLIND, State.DEGRADED, State.OK]):
        join(hub, number, state=state, state_reasons=(f"why {number}",))
    join(hub, 4, violations=3)
    fleet = client.get("/console/fleet").json()
    assert [row["key"][2] for row in fleet["ranks"]] == [4, 1, 2, 0, 3]
    assert fleet["state"] == "violated"
    assert (fleet["ranks"][0]["violations"], fleet["ranks"][1]["reasons"]) == (3, ["why 1"])


def test_coverage_and_checked_shares_are_by_group(client, hub):
    who = identity(0)
    part = msgspec.structs.replace(FULL, name="swa", protected_slot_bytes=48)
    hub.ingest(msgspec.structs.replace(hello(who), groups=(FULL, part)), lambda command: None)
    given = snapshot(who, 10, forwards={"full": 10}, forwards_checked={"full": 9})
    hub.ingest(given, lambda command: None)
    full, swa = client.get("/console/fleet").json()["ranks"][0]["groups"]
    assert (full["coverage"], full["checked"]) == (1.0, 0.9)
    assert (swa["coverage"], swa["checked"], swa["verified"]) == (0.75, None, 0)


def test_what_is_not_known_is_null(client, hub):
    hub.ingest(hello(identity(0)), lambda command: None)
    (row,) = client.get("/console/fleet").json()["ranks"]
    assert [row[name] for name in ("mode", "overhead", "time_ns", "oldest_check_seconds")] == [None] * 4
    assert row["groups"][0]["age_seconds"] is None


@pytest.mark.parametrize(("ended", "age"), [(None, 600.0), (10.0, 300.0)])
def test_the_age_is_that_of_the_latest_sweep_through_the_group(client, hub, ended, age):
    now = time.time()
    share = SweepShare(group="full", total=9, checked=9, violations=1, began=0.0, ended=ended or 0.0)
    sweep = progress("s", SweepStatus.VIOLATED, started_ns=int((now - 310) * 1e9), shares=(share,))
    join(hub, 0, last_sweep_ns=int((now - 600) * 1e9), sweep=sweep if ended else None)
    cell = client.get("/console/fleet").json()["ranks"][0]["groups"][0]
    assert cell["age_seconds"] == pytest.approx(age, abs=5.0)


def test_a_sweeps_numbers_are_over_all_ranks(hub):
    first, other = FakeRank(hub, finishes=False), join(hub, 1)
    record = hub.start_sweep(StartSweepRequest())
    row = sweep_row(hub.sweep(record.id))
    assert (row.eta_seconds, row.rate, row.ranks, row.ranks_ended) == (None, None, 2, 0)
    for who, checked in ((first.identity, 80), (other, 20)):
        report = progress(record.id, SweepStatus.RUNNING, checked=checked)
        hub.ingest(SweepReport(identity=who, progress=report), lambda command: None)
    row = sweep_row(hub.sweep(record.id))
    assert (row.checked, row.total) == (100, 200)
    first.report(record.id, SweepStatus.PASSED)
    row = sweep_row(hub.sweep(record.id))
    assert (row.status, row.ranks_ended) == (SweepStatus.RUNNING, 1)


def test_the_operators_latest_sweep_is_followed_to_its_end(client, hub, rank):
    assert client.get("/console/fleet").json()["sweep"] is None
    rank.finishes = False
    sweep = client.post("/canary/sweep").json()["id"]
    own = progress("idle", SweepStatus.PASSED, trigger=Trigger.IDLE)
    rank.send(SweepReport(identity=rank.identity, progress=own))
    assert client.get("/console/fleet").json()["sweep"]["status"] == "running"
    client.delete(f"/canary/sweeps/{sweep}")
    row = client.get("/console/fleet").json()["sweep"]
    assert (row["id"], row["status"]) == (sweep, "cancelled")


def test_only_changed_sweeps_are_copied(hub, rank, monkeypatch):
    follower = SweepFollower(hub)
    record = hub.start_sweep(StartSweepRequest())
    assert follower.latest().id == record.id
    copied = []
    original = hub.sweeps
    monkeypatch.setattr(hub, "sweeps", lambda known: copied.append(original(known)) or copied[-1])
    assert follower.latest().id == record.id
    assert copied == [[]]


def test_unacknowledged_incidents_come_first(client, hub):
    for instance in ("a", "b"):
        who = identity(0, instance=instance)
        hub.ingest(hello(who), lambda command: None)
        hub.ingest(Violations(identity=who, rows=(violation(1),)), lambda command: None)
        if instance == "a":
            client.post("/canary/acknowledge")
    shown = client.get("/console/fleet").json()["incidents"]
    assert [(one["instance"], one["acknowledged"]) for one in shown] == [("b", False), ("a", True)]


def test_a_fleet_of_64_ranks_is_a_small_document(client, hub):
    for number in range(64):
        join(hub, number)
    answer = client.get("/console/fleet")
    assert len(answer.json()["ranks"]) == 64
    assert len(answer.content) < 64 * 1024
