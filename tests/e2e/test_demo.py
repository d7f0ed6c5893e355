"""The demo as a user runs it: clean, perturbed, in mode raise, over many steps, and its overhead."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests import forked
from tests.sizes import sized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MODES = ("req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward")
# All at once tell the same of each. That each stops an engine is in tests/runtime/perturb/test_injector.py.
INJECTED, STOPPING = sized(([(mode,) for mode in MODES], MODES), ([MODES], MODES[1:2]))
SOAK_STEPS, GROWTH_BYTES = sized((100_000, 20e6), (25_000, 10e6))
CLEAN_STEPS, PERTURBED_STEPS = sized((1200, 1200), (600, 500))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
    return forked.run("canary_obs", *arguments, env=clean)


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


def test_soak_has_no_false_alarm_and_no_leak() -> None:
    """The longest, hence the first: the others run beside it."""
    found = summary(
        run("demo", "--steps", str(SOAK_STEPS), "--duration", "1800", "--shape", "tiny", "--json")
    )
    assert (found["violations"], found["state"]) == (0, "ok")
    assert found["rss_growth_bytes"] < GROWTH_BYTES
    print(f"checks done: {found['slots_verified']} slots, {found['bytes_verified']} bytes, 0 violations")


def test_clean_demo() -> None:
    found = summary(run("demo", "--steps", str(CLEAN_STEPS), "--seed", "1", "--json"))
    assert found["steps"] == CLEAN_STEPS
    for name in ("requests_finished", "tokens", "prefix_hit_tokens", "evictions", "preemptions", "aborts"):
        assert found[name] > 0, name
    assert found["slots_verified"] > 0
    assert found["bytes_verified"] > 0
    assert found["sweep_passes"] > 0
    assert (found["violations"], found["state"], found["slots_unverified"]) == (0, "ok", 0)
    assert 0 < found["overhead_ratio"] < 1


def test_sliding_windows_show_in_the_summary_and_the_log() -> None:
    done = run("demo", "--model", "swa", "--shape", "tiny", "--steps", "1100", "--seed", "1", "--json")
    found = summary(done)
    assert (found["violations"], found["state"], found["slots_unverified"]) == (0, "ok", 0)
    lines = [line for line in done.stderr.splitlines() if line.startswith("kv_canary_swa_divergence=")]
    reports = [json.loads(line.split("=", 1)[1]) for line in lines]
    assert [report["step"] for report in reports] == [1000, 1100]
    assert found["swa_divergence"].items() <= reports[-1].items()
    for report in reports:
        assert report["out_of_window"] >= 1
        assert report["index_divergence"] >= 1
        assert 0 < report["verified_swa"] < report["verified_full"]


def test_both_engines_of_a_disaggregated_pair() -> None:
    found = summary(run("demo", "--disaggregated", "--shape", "tiny", "--steps", "300", "--json"))
    for engine in (found["prefill"], found["decode"]):
        assert (engine["violations"], engine["state"], engine["slots_unverified"]) == (0, "ok", 0)
        assert engine["requests_finished"] > 0
        assert engine["evictions"] > 0


def test_a_disaggregated_engine_stops_in_mode_raise() -> None:
    done = run(
        "demo", "--disaggregated", "--shape", "tiny", "--steps", "600", "--mode", "raise",
        "--perturb", "real_kv_used=0.05",
    )  # fmt: skip
    assert done.returncode == 1
    assert "KVCacheViolation" in done.stderr


@pytest.mark.parametrize("modes", INJECTED, ids=" ".join)
def test_perturbed_demo(modes: tuple[str, ...]) -> None:
    perturb = ",".join(f"{mode}=0.05" for mode in modes)
    found = summary(
        run("demo", "--steps", str(PERTURBED_STEPS), "--seed", "1", "--json", "--perturb", perturb)
    )
    assert found["injections"].keys() == set(modes)
    for tally in found["injections"].values():
        assert tally["injected"] > 0
        assert tally["detected"] > 0
        assert (tally["missed"], tally["open"]) == (0, 0)
        assert tally["detected"] + tally["masked"] == tally["injected"]
        assert sum(tally["masked_because"].values()) == tally["masked"]
        assert {"median", "max"} <= tally["latency_steps"].keys()
    assert found["state"] == "violated"


@pytest.mark.parametrize("mode", STOPPING)
def test_mode_raise_stops_the_demo(mode: str) -> None:
    done = run("demo", "--duration", "60", "--seed", "1", "--mode", "raise", "--perturb", f"{mode}=0.05")
    assert done.returncode not in (0, 2)
    for text in ("KVCacheViolation", "reason=", "phase=", "group=full", "slot=", "position=", "request="):
        assert text in done.stderr


def test_overhead_is_under_ten_percent() -> None:
    found = summary(run("bench", "demo", "--json"))
    # The lower end of the confidence interval is tested: a busy machine widens the interval.
    assert found["overhead_95"][0] < 0.10
    assert found["unsound"] == {}
