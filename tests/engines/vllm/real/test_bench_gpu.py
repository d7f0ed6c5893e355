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
    told = json.loads(result.read_text())
    assert "unfinished" not in told
    assert (told["violations"], told["faults"]) == (0, 0)
    assert told["verified"] > 10_000
    assert all(len(told[part]["seconds"]) == 2 for part in ("prefill", "fill", "decode"))
    assert [len(told["prefill"]["each_ms"][kind]) for kind in ("none", "log")] == [1, 1]
    assert set(told["prefill_host_us"]) == set(told["decode_host_us"])
    assert told["prefill_host_us"]["tail"] > 0
    assert set(told["decode_host_us"]) >= {"head", "tail", "patrol", "pump", "adapter"}
    for flips in told["flips"].values():
        assert flips == {"flips": 2 * 4, "caught": 2 * 4, "other_violations": 0}
