"""A drill over two processes: from a slot in the engine's memory to the metric of the service."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(240)

SECRET = "drill-0123456789abcdef"


@pytest.mark.parametrize("arrivals", ["1", "0"])
def test_a_drill_changes_its_metrics_and_nothing_else(system, arrivals) -> None:
    tokens = system.folder / "tokens.toml"
    tokens.write_text(f'[drills]\ntoken = "{SECRET}"\nscopes = ["read", "inject"]\n')
    tokens.chmod(0o600)
    settings = {"KV_CANARY_DRILL_ENABLED": "true", "KV_CANARY_TOKENS_FILE": str(tokens)}
    log = system.folder / "events.jsonl"
    system.start(
        "serve", "--port", str(system.port), "--endpoint", system.endpoint,
        **settings, KV_CANARY_LOG_FILE=str(log),
    )  # fmt: skip
    system.until(lambda: system.get("/healthz").status == 200)
    system.start(
        "demo", "--shape", "tiny", "--arrivals", arrivals, "--endpoint", system.endpoint, **settings,
    )  # fmt: skip
    system.token = SECRET
    system.until(lambda: system.state() == "ok")
    assert system.metric("kv_canary_drills_total", outcome="detected") == 0
    for number in (1, 2):
        answer = system.request("POST", "/canary/drill")
        assert answer.status == 200, answer.body
        (rank,) = answer.json["ranks"]
        finding = rank["finding"]
        assert (finding["outcome"], finding["error"]) == ("detected", None)
        assert (finding["group"], finding["phase"], finding["reason"]) == ("full", "patrol", "kv_data")
        assert system.metric("kv_canary_drills_total", outcome="detected") == number
    assert system.metric("kv_canary_drill_last_detected_timestamp_seconds") == pytest.approx(
        answer.json["ended_ns"] / 1e9, abs=1e-3
    )
    assert system.state() == "ok"
    assert system.metric("kv_canary_violations_total") == 0
    assert system.metric("kv_canary_incidents_total") == 0
    assert system.get("/canary/violations").json["matching"] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["event"], line["route"], line["token"]) for line in lines] == [
        ("order", "/canary/drill", "drills")
    ] * 2
