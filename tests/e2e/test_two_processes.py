"""Engine and service as two processes: discovery, commands, and a kill of either side."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(240)


def test_an_engine_in_another_process_is_shown_and_swept(system) -> None:
    system.serve()
    refused = system.request("POST", "/canary/sweep")
    assert refused.status == 503
    assert refused.content_type.startswith("application/problem+json")
    assert system.state() == "off"

    system.engine()
    system.until(lambda: (system.metric("kv_canary_steps_total") or 0) > 50)
    assert system.state() == "ok"
    busy = system.request("POST", "/canary/sweep?wait=true")
    assert busy.status == 200, busy.body
    assert busy.json["status"] == "passed"
    (rank,) = busy.json["ranks"]
    assert (
        rank["progress"]["checked"] + sum(rank["progress"]["skipped"].values()) == rank["progress"]["total"]
    )
    assert rank["progress"]["total"] > 0
    system.until(lambda: (system.metric("kv_canary_sweep_passes_total", trigger="demand") or 0) >= 1)
    system.until(lambda: (system.metric("kv_canary_sweep_passes_total", trigger="interval") or 0) >= 2)
    assert system.metric("kv_canary_slots_verified_total", phase="head") > 0
    assert system.metric("kv_canary_violations_total") == 0


def test_an_idle_engine_is_swept(system) -> None:
    system.serve()
    system.engine("--arrivals", "0")
    system.until(lambda: system.state() == "ok")
    answer = system.request("POST", "/canary/sweep?wait=true")
    assert (answer.status, answer.json["status"]) == (200, "passed")


def test_one_sweep_at_a_time_and_refusals_are_problem_documents(system) -> None:
    system.token = "s3cret"
    system.serve()
    # A sweep that is slow enough to be still running when the next request arrives.
    system.start(
        "demo", "--shape", "demo", "--endpoint", system.endpoint, KV_CANARY_SWEEP_BUDGET_MS="0.0001",
    )  # fmt: skip
    system.until(lambda: (system.metric("kv_canary_steps_total") or 0) > 40)
    first = system.request("POST", "/canary/sweep")
    assert first.status == 202
    second = system.request("POST", "/canary/sweep")
    assert second.status == 409
    assert first.json["id"] in second.body
    assert system.request("GET", f"/canary/sweeps/{first.json['id']}").status == 200
    cases = {
        401: system.request("POST", "/canary/sweep", token="wrong"),
        422: system.request("POST", "/canary/sweep", body=b"{not json"),
        404: system.request("GET", "/canary/sweeps/nope"),
        409: second,
    }
    for status, answer in cases.items():
        assert answer.status == status
        assert answer.content_type.startswith("application/problem+json")
        assert {"type", "title", "status", "detail"} <= answer.json.keys()
    assert system.request("POST", "/canary/sweep", body={"data": "yes"}).status == 422
    assert "s3cret" not in system.logs()


def test_either_side_that_is_killed_comes_back(system) -> None:
    """Without its engine the service is blind, and its counters go on with the next one."""
    service = system.serve(KV_CANARY_SNAPSHOT_STALE_SECONDS="1")
    engine = system.engine()
    system.until(lambda: (system.metric("kv_canary_steps_total") or 0) > 100)
    engine.kill()
    engine.wait()
    system.until(lambda: system.state() == "blind")
    before = system.metric("kv_canary_steps_total")
    verified = system.metric("kv_canary_slots_verified_total")
    engine = system.engine()
    system.until(lambda: system.state() == "ok")
    readings = [before]
    system.until(
        lambda: readings.append(system.metric("kv_canary_steps_total")) or readings[-1] > before + 100
    )
    assert readings == sorted(readings)
    assert system.metric("kv_canary_slots_verified_total") > verified
    assert system.metric("kv_canary_restarts_total") == 1

    service.kill()
    service.wait()
    system.serve()
    system.until(lambda: (system.metric("kv_canary_steps_total") or 0) > readings[-1] - before)
    system.until(lambda: system.get("/canary/status").json["ranks"][0]["hello"] is not None)
    assert engine.poll() is None
    system.until(lambda: system.request("POST", "/canary/sweep?wait=true").status == 200)


def test_an_injected_fault_reaches_metrics_and_violations_without_token_ids(system) -> None:
    system.serve()
    system.engine("--perturb", "real_kv_used=0.2,req_to_token=0.2")
    system.until(lambda: (system.metric("kv_canary_violations_total", reason="kv_data") or 0) > 0)
    system.until(lambda: (system.metric("kv_canary_violations_total", reason="chain") or 0) > 0)
    assert system.state() == "violated"
    events = system.get("/canary/violations?limit=500").json["violations"]
    rows = [event["violation"] for event in events]
    assert {row["reason"] for row in rows} >= {"kv_data", "chain"}
    assert all(row["expected"] is None and row["actual"] is None for row in rows if row["reason"] == "chain")
    assert any(row["request"] for row in rows)
    assert system.metric("kv_canary_perturbations_total", outcome="missed") == 0
