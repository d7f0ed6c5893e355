"""Faults of the vLLM suite in engines on a GPU: python3 -m tests.gpu.vllm_faults --runner v2 --output FILE.

Each class of engine is a process with one engine, and several run at a time. Prints each fault as found,
masked (what was planted changed nothing) or missed. Exit code 1 = one was missed, or an engine did not run.
Also runs on CPUs (`--runner v2` in Triton's interpreter).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from canary_obs.bench.environment import environment

ENGINES = ("llama", "connector", "offload", "hybrid", "states")  # vllm_fault_cases.py, without importing vLLM
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    "KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": "inproc", "KV_CANARY_VERIFY_ON_HIT": "1",
    "KV_CANARY_LANE_ROWS": "1024",
}  # fmt: skip


def in_engine(name: str, runner: str, seconds: float) -> dict[str, Any]:
    """What became of each fault of one engine, in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.vllm_faults", "--runner", runner, "--only", name]
    settings = _SETTINGS | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        output = Path(folder) / "found.json"
        log = Path(folder) / "log"
        with log.open("wb") as file:
            try:
                process = subprocess.run(
                    [*command, "--output", str(output)], env=os.environ | settings, stdout=file,
                    stderr=file, timeout=seconds, check=False,
                )  # fmt: skip
                why = f"exit status {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                why = f"did not end within {seconds:.0f} s"
        found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"faults": {}}
        if why:
            found["error"] = f"{why}: {log.read_text(errors='replace')[-3000:]}"
        return found


def plant_all(name: str, runner: str, output: Path) -> None:
    """Plant the faults of one engine here; the file is complete after each of them."""
    if runner == "v2" and not torch.cuda.is_available():
        from tests.engines.vllm.real.interpreted import stand_in_driver

        os.environ["TRITON_INTERPRET"] = "1"
        stand_in_driver()
    from tests.gpu.fault_verdicts import after_all, facts, planted
    from tests.gpu.vllm_fault_cases import ENGINE_FAULTS

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        engine = ENGINE_FAULTS[name](Path(folder))
        result: dict[str, Any] = {"engine": facts(engine.rig), "faults": {}}
        result["engine"]["started_seconds"] = round(time.monotonic() - began, 1)
        for fault, plant in engine.faults.items():
            result["faults"][fault] = planted(engine.rig, plant)
            output.write_text(json.dumps(result))
        result["engine"] |= after_all(engine.rig)
        output.write_text(json.dumps(result))
        engine.rig.close()


def summary(engines: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Faults by what became of them, engines that did not run to their end, and those with false alarms."""
    counts = Counter(fault["verdict"] for found in engines.values() for fault in found["faults"].values())
    alarms = [
        found["engine"].get(when)
        for found in engines.values()
        for when in ("violations_when_clean", "violations_after")
        if "engine" in found
    ]
    failed = sum("error" in found for found in engines.values())
    return dict(counts) | {"engines_failed": failed, "false_alarms": sum(map(bool, alarms))}


def succeeded(counts: dict[str, int]) -> bool:
    """Whether each engine ran to its end without a false alarm, and nothing was missed or found otherwise."""
    bad = set(counts) - {"found", "masked", "engines_failed", "false_alarms"}
    return not (bad or counts["engines_failed"] or counts["false_alarms"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 = nothing was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", choices=("v1", "v2"), required=True)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: all")
    parser.add_argument("--only", choices=ENGINES, help="in this process")
    parser.add_argument("--processes", type=int, default=len(ENGINES))
    parser.add_argument("--seconds", type=float, default=150.0, help="for each engine")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.only:
        plant_all(given.only, given.runner, given.output)
        return 0
    names = given.engine or ENGINES
    result: dict[str, Any] = {"runner": given.runner} | environment() | {"engines": {}}
    with ThreadPoolExecutor(given.processes) as pool:
        waiting = {name: pool.submit(in_engine, name, given.runner, given.seconds) for name in names}
        for name, future in waiting.items():
            result["engines"][name] = found = future.result()
            for fault, seen in found["faults"].items():
                print(name, fault, seen["verdict"], seen.get("reasons"), seen.get("why", ""), flush=True)
            if "error" in found:
                print(name, found["error"], flush=True)
            result["summary"] = summary(result["engines"])
            given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(result["summary"])
    return int(not succeeded(result["summary"]))


if __name__ == "__main__":
    sys.exit(main())
