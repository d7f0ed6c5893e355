"""`canary-obs bench vllm-gpu` with a small model on the CPU: the same code that measures on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALL = "--shape small --runner v1 --requests 4 --context 200 --steps 8 --prefill 256 --prefills 1 --pairs 2"


def test_pairs_and_flips(tmp_path: Path) -> None:
    result = tmp_path / "bench.json"
    command = [
        sys.executable,
        "-m",
        "canary_obs",
        "bench",
        "vllm-gpu",
        *SMALL.split(),
        "--output",
        str(result),
    ]
    subprocess.run(command, env=os.environ, check=True, timeout=240, capture_output=True)
    figures = json.loads(result.read_text())
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
