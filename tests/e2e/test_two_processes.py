"""Engine and service as two real processes: they find each other, survive each other, and obey."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(240)


def test_a_second_processs_engine_is_shown_and_swept_busy_and_idle(house) -> None:
    house.serve()
    refused = house.request("POST", "/canary/sweep")
    assert refused.status == 503
    assert refused.content_type.startswith("application/problem+json")
    assert house.state() == "off"

    house.engine()
    house.until(lambda: (house.metric("kv_canary_steps_total") or 0) > 50)
    assert house.state() == "ok"
    busy = house.request("POST", "/canary/sweep?wait=true")
    assert busy.status == 200, busy.body
    assert busy.json["status"] == "passed"
    (rank,) = busy.json["ranks"]
    assert (
        rank["progress"]["checked"] + sum(rank["progress"]["skipped"].values()) == rank["progress"]["total"]
    )
    assert rank["progress"]["total"] > 0
    house.until(lambda: (house.metric("kv_canary_sweep_passes_total", trigger="demand") or 0) >= 1)
    house.until(lambda: (house.metric("kv_canary_sweep_passes_total", trigger="interval") or 0) >= 2)
    assert house.metric("kv_canary_slots_verified_total", phase="head") > 0
    assert house.metric("kv_canary_violations_total") == 0


def test_an_idle_engine_answers_too(house) -> None:
    house.serve()
    house.engine("--arrivals", "0")
    house.until(lambda: house.state() == "ok")
    answer = house.request("POST", "/canary/sweep?wait=true")
    assert (answer.status, answer.json["status"]) == (200, "passed")


def test_one_sweep_at_a_time_and_refusals_are_problem_documents(house) -> None:
    house.token = "s3cret"
    house.serve()
    # A sweep so slow that it is surely running when the next request arrives.
    house.start(
        "demo", "--shape", "demo", "--endpoint", house.endpoint, KV_CANARY_SWEEP_BUDGET_MS="0.0001",
    )  # fmt: skip
    house.until(lambda: (house.metric("kv_canary_steps_total") or 0) > 40)
    first = house.request("POST", "/canary/sweep")
    assert first.status == 202
    second = house.request("POST", "/canary/sweep")
    assert second.status == 409
    assert first.json["id"] in second.body
    assert house.request("GET", f"/canary/sweeps/{first.json['id']}").status == 200
    cases = {
        401: house.request("POST", "/canary/sweep", token="wrong"),
        422: house.request("POST", "/canary/sweep", body=b"{not json"),
        404: house.request("GET", "/canary/sweeps/nope"),
        409: second,
    }
    for status, answer in cases.items():
        assert answer.status == status
        assert answer.content_type.startswith("application/problem+json")
        assert {"type", "title", "status", "detail"} <= answer.json.keys()
    assert house.request("POST", "/canary/sweep", body={"data": "yes"}).status == 422
    assert "s3cret" not in house.logs()


def test_killed_engine_is_blind_and_its_restart_keeps_counters_monotonic(house) -> None:
    house.serve()
    engine = house.engine()
    house.until(lambda: (house.metric("kv_canary_steps_total") or 0) > 100)
    engine.kill()
    engine.wait()
    house.until(lambda: house.state() == "blind")
    before = house.metric("kv_canary_steps_total")
    verified = house.metric("kv_canary_slots_verified_total")
    house.engine()
    house.until(lambda: house.state() == "ok")
    readings = [before]
    house.until(lambda: readings.append(house.metric("kv_canary_steps_total")) or readings[-1] > before + 100)
    assert readings == sorted(readings)
    assert house.metric("kv_canary_slots_verified_total") > verified
    assert house.metric("kv_canary_restarts_total") == 1


def test_killed_service_comes_back_and_sees_the_engine_again(house) -> None:
    service = house.serve()
    engine = house.engine()
    house.until(lambda: (house.metric("kv_canary_steps_total") or 0) > 100)
    before = house.metric("kv_canary_steps_total")
    service.kill()
    service.wait()
    house.serve()
    house.until(lambda: (house.metric("kv_canary_steps_total") or 0) > before)
    house.until(lambda: house.get("/canary/status").json["ranks"][0]["hello"] is not None)
    assert engine.poll() is None
    house.until(lambda: house.request("POST", "/canary/sweep?wait=true").status == 200)


def test_a_planted_fault_reaches_metrics_and_violations_without_token_ids(house) -> None:
    house.serve()
    house.engine("--perturb", "real_kv_used=0.2,req_to_token=0.2")
    house.until(lambda: (house.metric("kv_canary_violations_total", reason="kv_data") or 0) > 0)
    house.until(lambda: (house.metric("kv_canary_violations_total", reason="chain") or 0) > 0)
    assert house.state() == "violated"
    events = house.get("/canary/violations?limit=500").json["violations"]
    rows = [event["violation"] for event in events]
    assert {row["reason"] for row in rows} >= {"kv_data", "chain"}
    assert all(row["expected"] is None and row["actual"] is None for row in rows if row["reason"] == "chain")
    assert any(row["request"] for row in rows)
    assert house.metric("kv_canary_perturbations_total", outcome="missed") == 0
