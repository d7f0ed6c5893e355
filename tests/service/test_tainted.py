"""Who read damage, over the API: in the incident, over all incidents, as an event and as metrics."""

from __future__ import annotations

from typing import Any

import msgspec

from canary_obs.records import Violations
from canary_obs.service.event_stream import EventStream
from canary_obs.service.incident.report import build_report
from canary_obs.vocabulary import Completeness
from tests.service.conftest import check_problem
from tests.service.fakes import snapshot, tainted, violation
from tests.service.test_event_stream import Clock


def test_an_incident_names_them(client: Any, rank: Any) -> None:
    rank.send(Violations(identity=rank.identity, rows=(violation(7),)))
    rank.send(tainted(rank.identity, 1, "r1", incident="as the rank names it"))
    rank.send(tainted(rank.identity, 2, completeness=Completeness.UNKNOWN, cause="forgotten"))
    (incident,) = client.get("/canary/incidents").json()["incidents"]
    first, second = client.get(f"/canary/incidents/{incident['id']}").json()["tainted"]
    assert (first["incident"], first["completeness"]) == (incident["id"], "known")
    assert first["requests"] == [
        {"request": "r1", "running": True, "step": 5, "derived": False, "first_output": 2, "outputs": 3}
    ]
    assert (second["requests"], second["completeness"], second["cause"]) == ([], "unknown", "forgotten")


def test_a_poll_continues_where_the_last_one_ended(client: Any, rank: Any) -> None:
    for number in range(1, 4):
        rank.send(tainted(rank.identity, number, "r1"))
    page = client.get("/canary/tainted?limit=2").json()
    assert (len(page["tainted"]), page["matching"], page["next"], page["evicted"]) == (2, 3, 2, False)
    page = client.get(f"/canary/tainted?since={page['next']}").json()
    assert ([one["number"] for one in page["tainted"]], page["next"]) == ([3], 3)
    assert client.get("/canary/tainted?since=3").json()["tainted"] == []
    rank.send(tainted(rank.identity, 1, "r2"))
    (changed,) = client.get("/canary/tainted?since=3").json()["tainted"]
    assert [one["request"] for one in changed["requests"]] == ["r1", "r2"]
    assert client.get("/canary/tainted?rank=9").json()["matching"] == 0
    check_problem(client.get("/canary/tainted?since=-1"), 422, "invalid-request")


def test_changes_are_events(hub: Any, rank: Any) -> None:
    stream = EventStream(hub, Clock())
    stream.poll()
    start = stream.last_number
    rank.send(tainted(rank.identity, 1, "r1"))
    stream.poll()
    stream.poll()
    (event,) = stream.after(start)
    assert (event.kind, event.data.requests[0].request) == ("tainted", "r1")


def test_they_are_counted(client: Any, rank: Any) -> None:
    counted = msgspec.structs.replace(
        snapshot(rank.identity, 2),
        tainted_requests={"full": {Completeness.KNOWN: 3, Completeness.UNKNOWN: 0}},
        taint_unknown={"full": 2},
    )  # fmt: skip
    rank.send(counted)
    page = client.get("/metrics").text
    assert 'kv_canary_tainted_requests_total{completeness="known"' in page
    assert page.count("kv_canary_taint_unknown_total{") == 1


def test_the_page_names_them_and_says_what_is_not_known(hub: Any, rank: Any) -> None:
    rank.send(Violations(identity=rank.identity, rows=(violation(7),)))
    incident = hub.incidents.newest_first()[0].id

    def note() -> str:
        report = build_report(hub, incident)
        assert report is not None
        return report.requests_note

    assert note() == "No rank has reported which requests read the damaged slots."
    rank.send(tainted(rank.identity, 1))
    assert note().startswith("No requests read damage")
    assert note().endswith("no other has.")
    rank.send(tainted(rank.identity, 2, "r1", completeness=Completeness.UNKNOWN, cause="they are forgotten"))
    assert note().startswith("1 request read damage")
    assert note().endswith("there may be more: they are forgotten.")
    assert [len(taint.requests) for taint in build_report(hub, incident).tainted] == [0, 1]
