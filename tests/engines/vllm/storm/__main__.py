"""No false alarm on a real vLLM: python -m tests.engines.vllm.storm --minutes 60 --output storm.json.

Each leg is a process of its own with a service of its own, at the settings of production. A storm is clean
when the verdict was `ok` from the third second to the end, nothing was reported, dropped or logged as a
warning, and every leg contained what it is there for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.vllm.storm.legs import LEGS

_START_SECONDS = 400.0


def run_leg(name: str, seconds: float, seed: int, *, fault: bool = False) -> dict[str, Any]:
    """The result of one leg; a leg that crashed is a problem, too."""
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        output = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "tests.engines.vllm.storm.leg",
            name,
            str(seconds),
            str(seed),
            str(output),
        ]
        ended = subprocess.run(
            command + ["--fault"] * fault, capture_output=True, text=True,
            timeout=seconds * 1.5 + _START_SECONDS, check=False,
        )  # fmt: skip
        if ended.returncode or not output.exists():
            return {"leg": name, "problems": [f"exit status {ended.returncode}: {ended.stderr[-3000:]}"]}
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def main() -> int:
    """Exit code 1 when a leg was not clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="load, summed over all legs")
    parser.add_argument("--leg", choices=sorted(LEGS), action="append", help="default: all of the device")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="legs at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", action="store_true", help="zero an idle block in each leg: none is clean")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    names = given.leg or [name for name, leg in LEGS.items() if given.device in leg.devices]
    shares = sum(LEGS[name].share for name in names)
    with ThreadPoolExecutor(given.processes) as pool:
        waiting = [
            pool.submit(
                run_leg, name, given.minutes * 60 * LEGS[name].share / shares, given.seed + number,
                fault=given.fault,
            )
            for number, name in enumerate(names)
        ]  # fmt: skip
        legs = []
        for future in waiting:
            legs.append(future.result())
            print(legs[-1]["leg"], legs[-1]["problems"] or "clean", legs[-1].get("events"), flush=True)
            if given.output:
                text = json.dumps({"minutes": given.minutes, "device": given.device, "legs": legs}, indent=1)
                given.output.write_text(text + "\n", encoding="utf-8")
    return int(any(leg["problems"] for leg in legs))


if __name__ == "__main__":
    sys.exit(main())
