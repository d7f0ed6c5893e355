"""The bench of a real SGLang with a tiny model on the CPU: the same code that measures on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.real.server import ROOT, environment

_OPTIONS = (
    "--shape tiny --requests 4 --context 64 --steps 16 --prefill 128 --prefills 1 --mixed 6 --tokens 2048 "
    "--rounds 2"
)
_LOADS = {"decode", "few", "single", "prefill", "hit", "mixed", "sweep"}


def measured(tmp_path: Path, options: str) -> dict[str, Any]:
    """Figures of the bench; a tiny model on a CPU misses most goals, and then it ends with 1."""
    output = tmp_path / "bench.json"
    command = [sys.executable, "-m", "canary_obs", "bench", "sglang-gpu", *_OPTIONS.split(), *options.split()]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY_")}
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, env=variables | environment(tmp_path, {}),
        timeout=400, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == ("goal missed: " in done.stderr), done.stderr[-4000:]
    figures = json.loads(output.read_text("utf-8"))
    assert figures["unsound"] == {}
    assert "unfinished" not in figures
    return dict(figures)


@pytest.mark.nightly
def test_with_and_without_in_one_engine(tmp_path: Path) -> None:
    figures = measured(tmp_path, "--one-engine --load decode --load single --load hit --verify-on-hit")
    assert set(figures["engines"]) == {"log"}
    assert len(figures["reports"]) == 3  # one for each round, and the first
    for report in (*figures["reports"], figures["canary"]):
        assert (report["violations"], report["observer_faults"], report["state"]) == (0, 0, ["ok"])
    # What the loads have written over had records.
    assert all(report["hashed"]["head"] > 64 for report in figures["reports"][1:])
    for load in figures["loads"].values():
        assert [len(load["answers"][name]) for name in ("none", "log")] == [2, 2]
    for name in ("decode", "single"):
        assert figures["loads"][name]["host_us"]["head"]["p50"] > 0
    # In each round the cached prompt of 64 tokens is found eight times.
    assert all(report["hashed"]["hit"] >= 8 * 64 for report in figures["reports"][1:])


@pytest.mark.nightly
def test_every_load_and_a_flip_in_every_layer(tmp_path: Path) -> None:
    figures = measured(tmp_path, "")
    assert figures["flips"] == {"flips": 2 * 3, "slot_named": 2 * 3, "other_violations": 0}
    assert (figures["canary"]["violations"], figures["canary"]["state"]) == (0, ["ok"])
    assert {name: engine["protected"] for name, engine in figures["engines"].items()} == {
        "none": False, "log": True,
    }  # fmt: skip
    assert set(figures["loads"]) == _LOADS
    for load in figures["loads"].values():
        assert [len(load["answers"][name]) for name in ("none", "log")] == [2, 2]
        assert load["throughput"]["pairs"] == 2
    for name in _LOADS - {"prefill", "hit"}:
        load = figures["loads"][name]
        assert 0 < load["host_us"]["head"]["p50"] < load["host_us"]["all"]["p50"]
        assert load["host_us"]["all"]["p50"] <= load["host_us"]["all"]["p99"]
        assert 0 < load["itl_p50_ms"]["none"] <= load["itl_p99_ms"]["none"]
    assert {"decode: host time p50, us", "single: host time p99, us"} <= set(figures["measures"])
    for answer in figures["loads"]["sweep"]["answers"]["log"]:
        assert answer["sweep"]["status"] in ("passed", "running")
        assert answer["swept_steps"] > 0
