from __future__ import annotations

import concurrent.futures
import threading
from datetime import UTC, datetime, timedelta

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.records import Acknowledge, Pause, PauseSweep, Resume, ResumeSweep, StartSweep, Violations
from canary_obs.service.app import create_app
from canary_obs.service.context import Dependencies
from canary_obs.vocabulary import Reason, SweepStatus
from tests.service.conftest import URL, FakeRank, bearer, check_problem, client_of
from tests.service.fakes import eventually, snapshot, violation

# Sweeps.


def test_a_sweep_is_accepted_and_can_be_looked_up(client, rank):
    rank.finishes = False
    options = {"groups": ["full"], "data": False, "unlocked_only": True, "swa_resident_only": True}
    answer = client.post("/canary/sweep", json=options)
    record = answer.json()
    assert answer.status_code == 202
    assert record["status"] == "running"
    assert (record["unlocked_only"], record["swa_resident_only"]) == (True, True)
    assert rank.received[-1] == StartSweep(
        id=record["id"], groups=("full",), data=False, unlocked_only=True, swa_resident_only=True
    )
    location = answer.headers["location"]
    assert location == f"/canary/sweeps/{record['id']}"
    rank.report(record["id"], SweepStatus.VIOLATED)
    found = client.get(location)
    assert (found.status_code, found.json()["status"]) == (200, "violated")
    assert found.json()["ranks"][0]["progress"]["checked"] == 100
    assert [sweep["id"] for sweep in client.get("/canary/sweeps").json()["sweeps"]] == [record["id"]]


def test_wait_answers_with_the_result(client, rank):
    rank.finishes = False
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/canary/sweep?wait=true")
        started = eventually(lambda: [one for one in rank.received if isinstance(one, StartSweep)])[0]
        assert not waiting.done()
        rank.report(started.id, SweepStatus.PASSED)
        answer = waiting.result(10)
    assert (answer.status_code, answer.json()["status"]) == (200, "passed")
    assert answer.json()["ended_ns"]


def test_wait_ends_with_202_when_the_sweep_takes_too_long():
    hub = Hub(ServiceConfig(sweep_timeout_seconds=0.05, snapshot_stale_seconds=600.0))
    FakeRank(hub, finishes=False)
    with client_of(create_app(hub)) as client:
        answer = client.post("/canary/sweep?wait=true")
    assert (answer.status_code, answer.json()["status"]) == (202, "running")


def test_waiting_for_a_sweep_while_paused_is_refused_at_once(client, rank):
    rank.send(snapshot(rank.identity, 2, paused=True))
    document = check_problem(client.post("/canary/sweep?wait=true"), 409, "paused")
    assert "sweeps are paused on fake/test/0; POST /canary/resume" in document["detail"]
    assert "no sweep was started" in document["detail"]
    assert client.get("/canary/sweeps").json()["sweeps"] == []
    assert client.post("/canary/sweep").status_code == 202


def test_a_pause_ends_the_wait_for_a_sweep(client, rank):
    rank.finishes = False
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/canary/sweep?wait=true")
        started = eventually(lambda: [one for one in rank.received if isinstance(one, StartSweep)])[0]
        rank.send(snapshot(rank.identity, 2, paused=True))
        try:
            document = check_problem(waiting.result(5), 409, "paused")
            assert client.get(f"/canary/sweeps/{started.id}").json()["status"] == "running"
        finally:
            rank.report(started.id, SweepStatus.CANCELLED)  # what still waits ends
    assert document["sweep_id"] == started.id


def test_a_second_sweep_conflicts_and_names_the_first(client, rank):
    rank.finishes = False
    running = client.post("/canary/sweep").json()["id"]
    document = check_problem(client.post("/canary/sweep"), 409, "sweep-in-progress")
    assert document["running_id"] == running


def test_a_sweep_without_an_engine_is_503(client):
    document = check_problem(client.post("/canary/sweep?wait=true"), 503, "no-engine")
    assert "no engine is attached" in document["detail"]


def test_a_sweep_of_an_unknown_group_names_the_known(client, rank):
    document = check_problem(client.post("/canary/sweep", json={"groups": ["swa"]}), 422, "unknown-group")
    assert document["known"] == ["full"]


@pytest.mark.parametrize(
    "body",
    [b"{bad", b"[]", b'"x"', b'{"data":1}', b'{"groups":"full"}', b'{"groups":[1]}', b'{"more":1}', b"\xff"],
)
def test_a_malformed_body_is_422(client, rank, body):
    answer = client.post("/canary/sweep", content=body, headers={"content-type": "application/json"})
    check_problem(answer, 422, "invalid-request")
    assert not any(isinstance(command, StartSweep) for command in rank.received)


def test_errors_do_not_repeat_what_was_sent(client, rank):
    answer = client.post("/canary/sweep", json={"groups": {"a secret prompt": 1}, "data": "a secret prompt"})
    check_problem(answer, 422, "invalid-request")
    assert "secret" not in answer.text


@pytest.mark.parametrize("query", ["wait=maybe", "wiat=true"])
def test_a_bad_query_is_422(client, rank, query):
    check_problem(client.post(f"/canary/sweep?{query}"), 422, "invalid-request")


@pytest.mark.parametrize(
    ("given", "kept"),
    [(f"00-{'ab' * 16}-{'cd' * 8}-01", True), ("00-ab-cd-01", False), ("x" * 5000, False), ("", False)],
)
def test_a_sweep_keeps_a_traceparent_that_is_valid(client, rank, given, kept):
    answer = client.post("/canary/sweep", headers={"traceparent": given})
    assert answer.status_code == 202
    assert answer.json()["traceparent"] == (given if kept else None)


def test_the_same_idempotency_key_starts_one_sweep(client, rank):
    rank.finishes = False
    first = client.post("/canary/sweep", headers={"Idempotency-Key": "k"})
    again = client.post("/canary/sweep", headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert len([one for one in rank.received if isinstance(one, StartSweep)]) == 1
    other = client.post("/canary/sweep", json={"data": False}, headers={"Idempotency-Key": "k"})
    check_problem(other, 409, "idempotency-key-reused")
    rank.report(first.json()["id"], SweepStatus.PASSED)
    waited = client.post("/canary/sweep?wait=true", headers={"Idempotency-Key": "k"})
    assert (waited.status_code, waited.json()["id"]) == (200, first.json()["id"])
    assert client.post("/canary/sweep", headers={"Idempotency-Key": "l"}).json()["id"] != first.json()["id"]


def test_cancelling(client, rank):
    rank.finishes = False
    sweep = client.post("/canary/sweep").json()["id"]
    assert client.delete(f"/canary/sweeps/{sweep}").json()["status"] == "cancelled"
    again = client.delete(f"/canary/sweeps/{sweep}")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    check_problem(client.delete("/canary/sweeps/none"), 404, "no-such-sweep")
    check_problem(client.get("/canary/sweeps/none"), 404, "no-such-sweep")


def test_a_sweep_is_paused_and_resumed(client, rank):
    rank.finishes = False
    sweep = client.post("/canary/sweep", json={"ranks": [0], "budget_ms": 2, "deadline_seconds": 60}).json()
    assert (sweep["request"]["budget_ms"], sweep["ranks_by_status"]) == (2.0, {"running": 1})
    place = f"/canary/sweeps/{sweep['id']}"
    for verb, command in (("pause", PauseSweep), ("resume", ResumeSweep)):
        answer = client.post(f"{place}/{verb}")
        assert (answer.status_code, answer.json()["paused"]) == (202, verb == "pause")
        assert rank.received[-1] == command(id=sweep["id"])
    client.delete(place)
    assert client.post(f"{place}/pause").status_code == 200
    check_problem(client.post("/canary/sweeps/none/pause"), 404, "no-such-sweep")


def test_a_sweep_for_a_window_answers_at_once(client, rank):
    now = datetime.now(UTC)
    window = f"{(now + timedelta(hours=2)):%H:%M}-{(now + timedelta(hours=3)):%H:%M}"
    answer = client.post("/canary/sweep?wait=true", json={"window": window})
    assert (answer.status_code, answer.json()["status"]) == (202, "scheduled")
    assert client.delete(answer.headers["location"]).json()["status"] == "cancelled"


@pytest.mark.parametrize(
    "body",
    [
        {"window": "22-5"}, {"window": "24:00-05:00"}, {"deadline_seconds": 0}, {"budget_ms": 1001},
        {"first_slot": -1}, {"ranks": [-1]}, {"used_only": 1}, {"slots": "used"}, {"request": ""},
    ],
)  # fmt: skip
def test_a_sweep_that_makes_no_sense_is_refused(client, rank, body):
    check_problem(client.post("/canary/sweep", json=body), 422, "invalid-request")
    assert not [one for one in rank.received if isinstance(one, StartSweep)]


# Commands to all ranks, status, violations.


@pytest.mark.parametrize(("path", "command"), [("pause", Pause()), ("resume", Resume())])
def test_commands_reach_the_ranks(client, hub, path, command):
    check_problem(client.post(f"/canary/{path}"), 503, "no-engine")
    rank = FakeRank(hub)
    answer = client.post(f"/canary/{path}")
    assert (answer.status_code, answer.json()) == (202, {"ranks": 1, "reached": ["fake/test/0"]})
    assert rank.received[-1] == command
    assert client.post(f"/canary/{path}", json={"ranks": [0], "engine": "fake"}).json()["ranks"] == 1
    document = check_problem(client.post(f"/canary/{path}", json={"ranks": [3]}), 404, "no-such-rank")
    assert document["known"] == ["fake/test/0"]
    check_problem(client.post(f"/canary/{path}", json={"rank": 0}), 422, "invalid-request")
    check_problem(client.post(f"/canary/{path}", json={"ranks": [True]}), 422, "invalid-request")
    check_problem(client.post(f"/canary/{path}", json={"ranks": [0.5]}), 422, "invalid-request")
    assert client.post(f"/canary/{path}", json={"ranks": [0.0]}).status_code == 202  # JSON's integer


def test_acknowledge(client, rank):
    assert client.post("/canary/acknowledge").json()["ranks"] == 1
    seen = Acknowledge(violations=0, faults=0, events_dropped=0, messages_dropped=0)
    assert rank.received[-1] == seen


def test_acknowledge_up_to_a_violation(client, rank):
    rank.send(Violations(identity=rank.identity, rows=(violation(1), violation(2))))
    rank.send(snapshot(rank.identity, 9, violations=2))
    assert client.post("/canary/acknowledge?up_to=1").json()["ranks"] == 1
    assert rank.received[-1].violations == 1
    check_problem(client.post("/canary/acknowledge?up_to=-1"), 422, "invalid-request")


def test_acknowledge_one_incident_and_undo_it(client, rank):
    rank.send(Violations(identity=rank.identity, rows=(violation(1),)))
    rank.send(snapshot(rank.identity, 9, violations=1))
    incident = client.get("/canary/incidents").json()["incidents"][0]["id"]
    seen = {"incident": incident, "by": "ada", "comment": "planned"}
    answer = client.post("/canary/acknowledge", json=seen)
    assert answer.status_code == 202
    assert answer.json()["incidents"] == {incident: [0]}
    assert client.get("/canary/acknowledgements").json() == {"acknowledgements": [answer.json()]}
    place = f"/canary/acknowledgements/{answer.json()['id']}"
    assert client.delete(place).json()["undone_ns"] is not None
    found = client.get(f"/canary/incidents/{incident}").json()["incident"]
    assert (found["acknowledged"], found["acknowledgements"][0]["by"]) == (False, "ada")
    check_problem(client.delete("/canary/acknowledgements/none"), 404, "no-such-acknowledgement")
    check_problem(client.post("/canary/acknowledge", json={"incident": "none"}), 404, "no-such-incident")
    for wrong in ({"incidents": incident}, {"incident": 7}, {"by": ""}, {"ranks": "0"}, {"up_to": -1}):
        check_problem(client.post("/canary/acknowledge", json=wrong), 422, "invalid-request")


def test_status_shows_the_verdict_and_every_rank(client, rank):
    status = client.get("/canary/status").json()
    assert (status["state"], status["reasons"]) == ("ok", [])
    assert status["ranks"][0]["identity"]["engine"] == "fake"
    assert status["ranks"][0]["totals"]["groups"]["full"]["verified"]["head"] == 10


def test_violations_are_filtered_and_paged(client, rank):
    rows = [violation(slot) for slot in range(5)] + [violation(9, reason=Reason.CHAIN)]
    rank.send(Violations(identity=rank.identity, rows=tuple(rows)))
    page = client.get("/canary/violations?limit=2&reason=kv_data").json()
    assert [event["number"] for event in page["violations"]] == [5, 4]
    assert (page["matching"], page["next"], page["evicted"]) == (5, 4, 0)
    rest = client.get("/canary/violations?limit=9&reason=kv_data&before=4").json()
    assert [event["number"] for event in rest["violations"]] == [3, 2, 1]
    assert rest["next"] is None
    check_problem(client.get("/canary/violations?reason=nonsense"), 422, "invalid-request")
    check_problem(client.get("/canary/violations?limit=0"), 422, "invalid-request")


# Metrics, status page and probes.


def test_metrics_answer_without_a_redirect_in_the_format_asked_for(client, rank):
    answer = client.get("/metrics", follow_redirects=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'kv_canary_steps_total{engine="fake",instance="test",rank="0"} 1.0' in answer.text
    open_metrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_probes(hub):
    listening = [True]
    with client_of(create_app(hub, dependencies=Dependencies(listening=lambda: listening[0]))) as client:
        assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}
        listening[0] = False
        assert client.get("/healthz").status_code == 200
        check_problem(client.get("/readyz"), 503, "not-listening")


# Errors.


def test_unknown_paths_and_methods_are_problems(client):
    check_problem(client.get("/nowhere"), 404)
    answer = client.put("/canary/sweep")
    check_problem(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert client.post("/canary/sweeps/x").headers["allow"] == "DELETE, GET"


def test_an_unexpected_error_is_a_problem_without_its_message(client, hub, monkeypatch, caplog):
    def fail():
        raise RuntimeError("an inner secret")

    monkeypatch.setattr(hub, "verdict", fail)
    answer = client.get("/canary/status")
    check_problem(answer, 500)
    assert "inner secret" not in answer.text
    assert "inner secret" in caplog.text


def test_a_body_that_is_too_long_is_refused(client, rank):
    check_problem(client.post("/canary/sweep", content=b" " * 70_000), 413)

    async def unannounced():
        for _ in range(100):
            yield b" " * 1000

    answer = client.post("/canary/sweep", content=unannounced(), headers={"content-type": "application/json"})
    assert answer.status_code >= 400
    assert not any(isinstance(command, StartSweep) for command in rank.received)


# Authentication.


@pytest.fixture
def guarded(hub):
    config = ServiceConfig(host="0.0.0.0", token="s3cret-of-ours-ü")
    with client_of(create_app(hub, config), "http://canary.example") as client:
        yield client


# The way in: the form, the files of the package that it loads, and its request.
PUBLIC = {("GET", "/sign-in"), ("GET", "/console/assets/{name}"), ("POST", "/console/session")}


def test_with_a_token_every_route_but_probes_and_sign_in_requires_it(guarded, rank):
    app = guarded.app
    paths = [*app.openapi()["paths"], "/openapi.json", "/nowhere"]
    assert len(paths) > 10
    for path in paths:
        for method in ("GET", "POST", "DELETE", "PUT"):
            answer = guarded.request(method, path.replace("{sweep_id}", "x"))
            if method == "GET" and path in ("/healthz", "/readyz"):
                assert answer.status_code == 200
            elif (method, path) in PUBLIC:
                assert answer.status_code in (200, 404, 422), path
            else:
                check_problem(answer, 401)
                assert answer.headers["www-authenticate"].startswith("Bearer")
    assert not any(isinstance(command, StartSweep) for command in rank.received)


@pytest.mark.parametrize(
    "header",
    [
        "Bearer wrong",
        "Bearer",
        "Bearer ",
        "Basic s3cret-of-ours-ü",
        "s3cret-of-ours-ü",
        "Bearer s3cret-",
        "Bearer s3cret-of-ours-üx",
    ],
)
def test_wrong_credentials_are_401(guarded, header):
    check_problem(guarded.get("/metrics", headers={"Authorization": header.encode()}), 401)


def test_a_valid_token_is_accepted(guarded, rank):
    assert guarded.get("/metrics", headers=bearer("s3cret-of-ours-ü")).status_code == 200
    assert guarded.post("/canary/sweep?wait=true", headers=bearer("s3cret-of-ours-ü")).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_a_wide_bind_without_a_token_is_refused(hub, host):
    with pytest.raises(ConfigurationError, match="only binds to loopback"):
        create_app(hub, ServiceConfig(host=host))


def test_without_a_token_only_loopback_names_are_served(client):
    for host in ("localhost:9464", "127.0.0.1", "[::1]:9464"):
        assert client.get("/metrics", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "[bad"):
        check_problem(client.get("/metrics", headers={"Host": host}), 421)


def test_a_page_of_another_origin_may_not_send_write_requests(client, rank):
    check_problem(client.post("/canary/sweep", headers={"Origin": "https://evil.example"}), 403)
    check_problem(client.post("/canary/sweep", headers={"Origin": "http://["}), 403)
    assert client.post("/canary/sweep", headers={"Origin": URL}).status_code == 202


def test_many_readers_and_one_writer(client, hub, rank):
    failures = []

    def read():
        for _ in range(10):
            paths = ("/metrics", "/", "/canary/status", "/canary/violations")
            failures.extend(path for path in paths if client.get(path).status_code != 200)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        rank.send(Violations(identity=rank.identity, rows=(violation(),)))
    assert failures == []
    assert hub.violations()


@pytest.mark.parametrize("method", ["TRACE", "PUT", "CONNECT"])
def test_a_method_that_a_path_does_not_have_is_405(client, method):
    answer = client.request(method, "/canary/status")
    check_problem(answer, 405)
    assert answer.headers["allow"] == "GET"
