from __future__ import annotations

import concurrent.futures

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.records import StartDrill
from canary_obs.service import context
from canary_obs.service.app import create_app
from canary_obs.service.routes import drills
from tests.service.conftest import FakeRank, bearer, check_problem, client_of
from tests.service.fakes import drilled, eventually

SECRET, SINGLE = "drill-0123456789abcdef", "single-0123456789abcdef"


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(f'[drills]\ntoken = "{SECRET}"\nscopes = ["inject"]\n')
    path.chmod(0o600)
    return {"token": SINGLE, "tokens_file": str(path)}


@pytest.fixture
def drill_client(hub, tokens):
    with client_of(create_app(hub, ServiceConfig(drill_enabled=True, **tokens))) as client:
        yield client


def drill(client, token=SECRET):
    return client.post("/canary/drill", headers=bearer(token))


def test_a_drill_answers_for_every_rank(drill_client, rank):
    answer = drill(drill_client)
    assert answer.status_code == 200
    (one,) = answer.json()["ranks"]
    assert one["key"] == ["fake", "test", 0]
    assert one["finding"] == {
        "id": answer.json()["id"],
        "outcome": "detected",
        "error": None,
        "group": "full",
        "slot": 0,
        "phase": "patrol",
        "reason": "kv_data",
        "latency_steps": 1,
        "latency_ms": 2.5,
    }


def test_a_drill_by_rank_asks_no_other(drill_client, hub, rank):
    answer = drill_client.post("/canary/drill", headers=bearer(SECRET), json={"ranks": [0]})
    assert [one["key"] for one in answer.json()["ranks"]] == [["fake", "test", 0]]
    nobody = drill_client.post("/canary/drill", headers=bearer(SECRET), json={"ranks": [5]})
    check_problem(nobody, 404, "no-such-rank")
    assert drill(drill_client).status_code == 200  # none is left running


def test_only_a_token_with_inject_may_and_only_where_drills_are_on(drill_client, hub, rank, tokens):
    check_problem(drill(drill_client, SINGLE), 403, "missing-scope")
    with client_of(create_app(hub, ServiceConfig(drill_enabled=True))) as anybody:
        check_problem(anybody.post("/canary/drill"), 403, "missing-scope")
    with client_of(create_app(hub, ServiceConfig(**tokens))) as off:
        document = check_problem(drill(off), 403, "drills-disabled")
    assert "KV_CANARY_DRILL_ENABLED" in document["detail"]
    assert not any(isinstance(command, StartDrill) for command in rank.received)


def test_without_an_engine_nothing_is_left_open(drill_client, hub):
    check_problem(drill(drill_client), 503, "no-engine")
    FakeRank(hub)
    assert drill(drill_client).status_code == 200


def test_a_second_drill_conflicts_until_the_first_has_ended(drill_client, rank):
    rank.finishes = False
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(drill, drill_client)
        asked = eventually(lambda: [one for one in rank.received if isinstance(one, StartDrill)])[0]
        check_problem(drill(drill_client), 409, "drill-in-progress")
        rank.send(drilled(rank.identity, asked.id))
        assert waiting.result(10).json()["ranks"][0]["finding"]["outcome"] == "detected"


def test_a_silent_rank_is_named(drill_client, rank, monkeypatch):
    rank.finishes = False
    monkeypatch.setattr(drills, "DRILL_SECONDS", 0.05)
    (one,) = drill(drill_client).json()["ranks"]
    assert one["finding"]["outcome"] == "unanswered"
    assert context.DRILL_SECONDS > 10
