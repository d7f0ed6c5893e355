"""Write requests are audited with their caller, and rate-limited."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.records import Pause
from canary_obs.service.app import create_app
from canary_obs.service.context import Dependencies
from tests.service.conftest import bearer, check_problem, client_of

READER, WRITER = "reader-0123456789abcdef", "writer-0123456789abcdef"
TOKENS = f"""
[prometheus]
token = "{READER}"
scopes = ["read"]
[oncall]
token = "{WRITER}"
scopes = ["operate"]
"""


@pytest.fixture
def events():
    return []


@pytest.fixture
def guarded(hub, rank, events, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    path.chmod(0o600)
    config = ServiceConfig(token="single", tokens_file=str(path), orders_per_minute=4)
    with client_of(create_app(hub, config, dependencies=Dependencies(audit=events.append))) as client:
        yield client


def fields(event):
    return event.method, event.route, event.path, event.scope, event.token, event.status


def test_every_write_request_is_audited_with_its_caller_and_outcome(guarded, rank, events):
    rank.finishes = False
    sweep = guarded.post("/canary/sweep", headers=bearer(WRITER))
    guarded.delete(sweep.headers["location"], headers=bearer("single"))
    guarded.post("/canary/pause", headers=bearer("single"))
    guarded.post("/canary/sweep", content=b"{bad", headers=bearer(WRITER))
    guarded.post("/canary/acknowledge", headers=bearer(READER))
    place = sweep.headers["location"]
    assert [fields(event) for event in events] == [
        ("POST", "/canary/sweep", "/canary/sweep", "operate", "oncall", 202),
        ("DELETE", "/canary/sweeps/{sweep_id}", place, "operate", "default", 200),
        ("POST", "/canary/pause", "/canary/pause", "operate", "default", 202),
        ("POST", "/canary/sweep", "/canary/sweep", "operate", "oncall", 422),
        ("POST", "/canary/acknowledge", "/canary/acknowledge", "operate", "prometheus", 403),
    ]
    assert [event.location for event in events] == [place, None, None, None, None]
    assert {event.client for event in events} == {"127.0.0.1"}
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    assert all(event.seconds >= 0 for event in events)
    assert READER not in str(events)
    assert WRITER not in str(events)


def test_reads_and_unknown_callers_are_not_audited(guarded, events):
    for path in ("/metrics", "/canary/status", "/canary/sweeps", "/healthz", "/nowhere"):
        guarded.get(path, headers=bearer("single"))
    guarded.post("/nowhere", headers=bearer("single"))
    # A client without a token must not be able to fill the disk.
    check_problem(guarded.post("/canary/sweep", headers=bearer("wrong")), 401)
    assert events == []


@pytest.mark.parametrize("method", ["TRACE", "PUT", "DELETE", "PATCH"])
def test_a_method_that_a_path_does_not_have_is_a_refused_write_request(guarded, events, method):
    guarded.request(method, "/canary/pause", headers=bearer(WRITER))
    guarded.request(method, "/canary/incidents/7", headers=bearer(READER))
    # Unknown callers and places, and what only reads:
    guarded.request(method, "/canary/pause", headers=bearer("wrong"))
    guarded.request(method, "/nowhere", headers=bearer(WRITER))
    guarded.get("/canary/pause", headers=bearer(WRITER))
    assert [fields(event) for event in events] == [
        (method, "/canary/pause", "/canary/pause", None, "oncall", 405),
        (method, "/canary/incidents/{incident_id}", "/canary/incidents/7", None, "prometheus", 405),
    ]


def test_a_write_request_of_a_foreign_page_is_audited(guarded, events):
    foreign = bearer(WRITER) | {"Origin": "http://evil.example"}
    guarded.post("/canary/pause", headers=foreign)
    guarded.put("/canary/pause", headers=foreign)
    assert [event.status for event in events] == [403, 405]


def test_a_write_request_that_fails_is_audited(guarded, hub, events, monkeypatch):
    def fail(_selection):
        raise RuntimeError("broken")

    monkeypatch.setattr(hub, "pause", fail)
    check_problem(guarded.post("/canary/pause", headers=bearer("single")), 500)
    assert [fields(event)[-2:] for event in events] == [("default", None)]


def test_without_tokens_the_caller_has_no_name(hub, rank, events):
    with client_of(create_app(hub, dependencies=Dependencies(audit=events.append))) as client:
        client.post("/canary/resume")
    assert [fields(event)[-2:] for event in events] == [(None, 202)]


def test_too_many_write_requests_are_refused_and_reach_no_rank(guarded, rank, events):
    statuses = [guarded.post("/canary/pause", headers=bearer(WRITER)).status_code for _ in range(4)]
    assert statuses == [202] * 4
    refused = guarded.post("/canary/pause", headers=bearer(WRITER))
    check_problem(refused, 429, "too-many-orders")
    assert 1 <= int(refused.headers["retry-after"]) <= 15
    assert rank.received.count(Pause()) == 4
    assert events[-1].status == 429
    assert guarded.post("/canary/pause", headers=bearer("single")).status_code == 202


def test_reads_are_not_limited_and_refusals_do_not_count(guarded):
    for _ in range(10):
        assert guarded.get("/metrics", headers=bearer(READER)).status_code == 200
        check_problem(guarded.post("/canary/pause", headers=bearer(READER)), 403, "missing-scope")


def test_an_acknowledgement_carries_the_name_of_its_token(guarded, rank):
    assert guarded.post("/canary/acknowledge", headers=bearer(WRITER)).json()["by"] == "oncall"
    named = guarded.post("/canary/acknowledge", headers=bearer(WRITER), json={"by": "ada"})
    assert named.json()["by"] == "ada"
