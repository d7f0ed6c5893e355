"""Two GPUs, one engine process each, one service: python -m tests.gpu.two_ranks --output two_ranks.json."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from canary_obs.bench.environment import environment
from canary_obs.engines.toolkit.service_process import ServiceProcess, free_port

FAULTY = 1  # the rank whose engine is perturbed
SERIES = ("kv_canary_steps_total", "kv_canary_violations_total", "kv_canary_bytes_verified_total")
_PATIENCE = 90.0


def engine(rank: int, endpoint: str, seconds: float) -> subprocess.Popen[bytes]:
    """The demo engine of a rank on the GPU of the same number."""
    command = [sys.executable, "-m", "canary_obs", "demo", "--device", f"cuda:{rank}", "--json"]
    command += ["--endpoint", endpoint, "--duration", str(seconds), "--seed", str(rank + 1)]
    if rank == FAULTY:
        command += ["--perturb", "real_kv_used=0.02"]
    return subprocess.Popen(command, env=os.environ | {"KV_CANARY_RANK": str(rank)})


def by_rank(url: str) -> dict[str, dict[str, float]]:
    """Each rank's series at the service, summed over the other labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5.0) as answer:
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in SERIES and "rank" in sample.labels:
                mine = found.setdefault(sample.labels["rank"], dict.fromkeys(SERIES, 0.0))
                mine[sample.name] += sample.value
    return found


def devices(url: str) -> dict[str, str]:
    """The device that each rank reports."""
    with urllib.request.urlopen(f"{url}/canary/status", timeout=5.0) as answer:
        status: dict[str, Any] = json.load(answer)
    return {str(rank["identity"]["rank"]): rank["identity"]["device"] for rank in status["ranks"]}


def settled(found: dict[str, dict[str, float]]) -> bool:
    """Both ranks run, and the perturbed one has been caught."""
    steps, violations, _ = SERIES
    return set(found) == {"0", "1"} and (
        all(rank[steps] > 100 for rank in found.values()) and found[str(FAULTY)][violations] > 0
    )


def run(seconds: float) -> dict[str, Any]:
    """Figures by rank once both engines have run for a while."""
    endpoint = f"ipc://{tempfile.mkdtemp()}/canary.sock"
    port = free_port()
    service = ServiceProcess.start(endpoint, port)
    engines = [engine(rank, endpoint, seconds) for rank in range(2)]
    try:
        deadline = time.monotonic() + _PATIENCE
        while not settled(found := by_rank(service.url)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return {"by_rank": found, "devices": devices(service.url)}
    finally:
        for process in engines:
            process.wait()
        service.stop()


def main() -> int:
    """Exit code 0 = labels by rank are right and the fault stands under its own rank only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result = {"environment": environment(), **run(given.seconds)}
    sys.stdout.write(json.dumps(result) + "\n")
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    found, violations = result["by_rank"], SERIES[1]
    ok = settled(found) and found["0"][violations] == 0
    return int(not ok or not all(f"cuda:{rank}" in name for rank, name in result["devices"].items()))


if __name__ == "__main__":
    sys.exit(main())
