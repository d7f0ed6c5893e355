"""The table that counts: python -m tests.engines.vllm.heal_table --requests 1000 --policy off --output FILE.

Greedy requests on a real vLLM, with faults at random and without: which wrong answers were delivered, and
whether each of them is listed as tainted. Every runner is a process of its own. Exit code 1 when a wrong
answer is not listed, or delivered after its detection under `protect`, or when runs without faults differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engines.vllm.heal.program import ASYNCHRONOUS, DEVICE, DRAFTING, DRAFTS
from tests.engines.vllm.heal.table import passed, row_in

RUNNERS = ("V1", "V2")
_START_SECONDS, _SECONDS_PER_REQUEST = 300.0, {"V1": 2.0, "V2": 12.0}


def measure(runner: str, requests: int, seed: int, policy: str, output: Path) -> dict[str, Any]:
    """The row of one runner in `output`. Raises RuntimeError with the end of its log when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        arguments = [runner, str(requests), str(seed), policy, str(output)]
        command = [sys.executable, "-m", "tests.engines.vllm.heal.program", *arguments]
        patience = _START_SECONDS + requests * _SECONDS_PER_REQUEST[runner]
        with log.open("wb") as file:
            ended = subprocess.run(command, stdout=file, stderr=file, timeout=patience, check=False)
        row = row_in(output, runner, policy)
        if ended.returncode or row is None:
            raise RuntimeError(f"{runner} ended with {ended.returncode}: {log.read_text()[-8000:]}")
        return row


def main(arguments: list[str] | None = None) -> int:
    """One row per runner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--policy", default="off", help="of KV_CANARY_HEAL")
    parser.add_argument("--runner", choices=RUNNERS, action="append", help="default: both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="goes on where an earlier call ended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="asynchronous scheduling also on a CPU; a GPU has it anyway",
    )
    parser.add_argument("--drafts", choices=DRAFTS, help="speculate with these; default: do not")
    given = parser.parse_args(arguments)
    os.environ[DEVICE] = given.device
    os.environ[ASYNCHRONOUS] = str(int(given.asynchronous))
    os.environ[DRAFTING] = given.drafts or ""
    rows = []
    for runner in given.runner or RUNNERS:
        rows.append(measure(runner, given.requests, given.seed, given.policy, given.output))
        print(json.dumps(rows[-1], indent=1), flush=True)
    return int(not all(map(passed, rows)))


if __name__ == "__main__":
    sys.exit(main())
