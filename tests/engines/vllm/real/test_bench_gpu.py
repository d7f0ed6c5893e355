"""The benches of a real vLLM with small models on the CPU: the same code that measures on a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import forked

SMALL = "--shape small --runner v1 --requests 4 --context 200 --steps 8 --prefill 256 --prefills 1 --pairs 2"
LOADS = (
    "--shape tiny --runner v1 --requests 3 --context 96 --steps 8 --prefill 256 --prefills 1 --mixed 4 "
    "--short 4 --batches 1 --batches 4 --rounds 2 --memory 0.1 --no-control"
)

HOST = "--batches 1 --batches 4 --steps 8 --rounds 2"


def run_bench(name: str, options: str, output: Path) -> tuple[dict[str, Any], str]:
    """Its figures, and what it said. Tiny models on a CPU miss most goals, and then it ends with 1."""
    command = ["canary_obs", "bench", name, *options.split(), "--output", str(output)]
    done = forked.run(*command, env=os.environ, seconds=400)
    assert done.returncode == ("goal missed: " in done.stderr), done.stderr[-2000:]
    assert "do not count" not in done.stderr
    return json.loads(output.read_text()), done.stderr


def test_pairs_and_flips(tmp_path: Path) -> None:
    figures, said = run_bench("vllm-gpu", SMALL, tmp_path / "bench.json")
    missed = [name for name, measure in figures["measures"].items() if not measure["met"]]
    assert [f"goal missed: {name} is" in said for name in figures["measures"]] == [
        name in missed for name in figures["measures"]
    ]
    assert "unfinished" not in figures
    assert (figures["violations"], figures["faults"]) == (0, 0)
    assert figures["verified"] > 10_000
    assert all(len(figures[part]["seconds"]) == 2 for part in ("prefill", "fill", "decode"))
    assert [len(figures["prefill"]["each_ms"][kind]) for kind in ("none", "log")] == [1, 1]
    assert set(figures["prefill_host_us"]) == set(figures["decode_host_us"])
    assert figures["prefill_host_us"]["tail"] > 0
    assert set(figures["decode_host_us"]) >= {"head", "tail", "patrol", "pump", "adapter"}
    for flips in figures["flips"].values():
        assert flips == {"flips": 2 * 4, "caught": 2 * 4, "other_violations": 0}


def test_host_time_of_steady_batches_without_kernels(tmp_path: Path) -> None:
    figures, _ = run_bench("vllm-host", HOST, tmp_path / "host.json")
    assert "unfinished" not in figures
    assert set(figures["batches"]) == {"batch-1", "batch-4"}
    for batch in figures["batches"].values():
        assert (batch["per"], batch["all"]["count"]) == ("step", 2 * 8)
        assert set(batch) >= {"adapter", "head", "kernels", "patrol", "pump", "scheduler", "tail"}
        assert all(batch[hook]["p50"] > 0.0 for hook in ("adapter", "head", "kernels", "scheduler", "tail"))
    assert (figures["canary"]["violations"], figures["canary"]["state"]) == (0, ["ok"])


@pytest.mark.nightly
def test_every_load_on_a_pool_in_use(tmp_path: Path) -> None:
    figures, said = run_bench("vllm-load", LOADS, tmp_path / "load.json")
    assert "unfinished" not in figures
    loads = figures["loads"]
    decoding = {"decode", "single", "mixed", "short"}
    assert set(loads) == decoding | {"prefill", "ttft", "ttft-busy", "batch-1", "batch-4"}
    for name, load in loads.items():
        # Only the canary's engine runs the batches.
        assert ("throughput" in load) == (name in decoding | {"prefill"})
        assert ("itl_p99_ms" in load) == (name in decoding | {"ttft-busy"})
        assert ("ttft_ms" in load) == name.startswith("ttft")
        for figure in ("throughput", "itl_p50_ms", "itl_p99_ms", "ttft_ms"):
            if figure in load:
                assert [load[figure]["pairs"], len(load[figure]["each"])] == [2, 2]
                low, high = load[figure]["ratio_95"]
                assert 0.0 < low <= load[figure]["ratio"] <= high
        assert set(load["host_us"]) >= {"all", "head", "tail", "patrol", "pump", "adapter", "scheduler"}
        assert 0.0 < load["host_us"]["head"]["p50"] < load["host_us"]["all"]["p50"]
        assert load["host_us"]["all"]["p50"] <= load["host_us"]["all"]["p99"]
    # Steps or requests of two rounds.
    assert loads["batch-4"]["host_us"]["all"]["count"] == loads["decode"]["host_us"]["all"]["count"] == 2 * 8
    assert (loads["prefill"]["host_us"]["per"], loads["prefill"]["host_us"]["all"]["count"]) == ("request", 2)
    assert (loads["ttft"]["host_us"]["per"], loads["ttft"]["host_us"]["all"]["count"]) == ("request", 16)
    assert "goal missed: rounds is 2, must be at least 8" in said
    assert set(figures["measures"]) >= {
        "decode: throughput", "mixed: inter-token latency p99", "ttft: time to first token",
        "batch-1: host time p50, us", "batch-4: host time p99, us",
    }  # fmt: skip
    # The bytes of earlier requests are compared before they are overwritten.
    assert figures["canary"]["hashed"]["head"] > 1_000
    assert (figures["canary"]["violations"], figures["canary"]["state"]) == (0, ["ok"])
    for flips in figures["flips"]["counts"].values():
        assert flips == {"flips": 2 * 3, "caught": 2 * 3, "other_violations": 0}


@pytest.mark.nightly
def test_loads_of_layers_that_keep_states(tmp_path: Path) -> None:
    options = LOADS.replace("tiny", "qwen3-next-tiny").replace("--prefill 256", "--prefill 2048")
    figures, _ = run_bench("vllm-load", f"{options} --loads decode --loads mixed", tmp_path / "load.json")
    assert (figures["canary"]["violations"], figures["canary"]["state"]) == (0, ["ok"])
    counts = figures["flips"]["counts"]
    assert counts["states"] == {"flips": 6, "caught": 6, "other_violations": 0}
    assert {where: count["caught"] for where, count in counts.items()} == {
        "idle": 2,
        "states": 6,
        "in_use": 2,
    }
