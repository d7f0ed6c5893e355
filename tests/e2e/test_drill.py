"""A drill over real processes: from a slot of the engine's memory to the number that Prometheus scrapes."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(240)

SECRET = "drill-0123456789abcdef"


@pytest.mark.parametrize("arrivals", ["1", "0"])
def test_a_drill_goes_from_the_slot_to_the_metric_and_nowhere_else(house, arrivals) -> None:
    tokens = house.folder / "tokens.toml"
    tokens.write_text(f'[drills]\ntoken = "{SECRET}"\nscopes = ["read", "inject"]\n')
    settings = {"KV_CANARY_DRILL_ENABLED": "true", "KV_CANARY_TOKENS_FILE": str(tokens)}
    log = house.folder / "events.jsonl"
    house.start(
        "serve", "--port", str(house.port), "--endpoint", house.endpoint,
        **settings, KV_CANARY_LOG_FILE=str(log),
    )  # fmt: skip
    house.until(lambda: house.get("/healthz").status == 200)
    house.start(
        "demo", "--shape", "tiny", "--arrivals", arrivals, "--endpoint", house.endpoint, **settings,
    )  # fmt: skip
    house.token = SECRET
    house.until(lambda: house.state() == "ok")
    assert house.metric("kv_canary_drills_total", outcome="detected") == 0
    for number in (1, 2):
        answer = house.request("POST", "/canary/drill")
        assert answer.status == 200, answer.body
        (rank,) = answer.json["ranks"]
        finding = rank["finding"]
        assert (finding["outcome"], finding["error"]) == ("detected", None)
        assert (finding["group"], finding["phase"], finding["reason"]) == ("full", "patrol", "kv_data")
        assert house.metric("kv_canary_drills_total", outcome="detected") == number
    assert house.metric("kv_canary_drill_last_detected_timestamp_seconds") == pytest.approx(
        answer.json["ended_ns"] / 1e9, abs=1e-3
    )
    assert house.state() == "ok"
    assert house.metric("kv_canary_violations_total") == 0
    assert house.metric("kv_canary_incidents_total") == 0
    assert house.get("/canary/violations").json["matching"] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["event"], line["route"], line["token"]) for line in lines] == [
        ("order", "/canary/drill", "drills")
    ] * 2
