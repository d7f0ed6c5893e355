"""No false alarm on a real vLLM: python -m tests.engines.vllm.storm --minutes 60 --output storm.json.

Each leg is a process of its own with a service of its own, at the settings of production. A storm is clean
when the verdict was `ok` from the third second to the end, nothing was reported, dropped or logged as a
warning, and every leg checked and contained what it is there for. With --fault each leg is damaged, and the
storm succeeds when every leg reports that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.engines.vllm.storm.legs import LEGS, leg_seconds

_START_SECONDS = 400.0
_SAID = 300  # characters of each problem; the rest is in the result
_FAULTS = ("zeroed", "table")  # faults.py, without importing an engine


def run_leg(name: str, seconds: float, seed: int, *, fault: str = "", patience: float | None = None) -> Any:
    """The result of one leg; one that crashed, or did not end within `patience` seconds, is a problem."""
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        output, log = Path(folder) / "result.json", Path(folder) / "log"
        arguments = [name, str(seconds), str(seed), str(output), *([fault] if fault else [])]
        command = [sys.executable, "-m", "tests.engines.vllm.storm.leg", *arguments]
        try:
            with log.open("wb") as file:
                why = _ended(command, file, patience or seconds * 1.5 + _START_SECONDS)
            if why is None:
                return json.loads(output.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        told = log.read_text(encoding="utf-8", errors="replace")[-3000:] if log.exists() else ""
        return {"leg": name, "seed": seed, "crashed": True, "problems": [f"{why}: {told}"]}


def _ended(command: list[str], log: Any, patience: float) -> str | None:
    """Why a program did not do its work; its process group has ended."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        status = process.wait(patience)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"did not end within {patience:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # it, or a service that outlived it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def succeeded(legs: Iterable[dict[str, Any]], names: Iterable[str], *, fault: str) -> bool:
    """Every leg has a result; clean, or a known problem of a leg that is not expected to be clean.

    With a fault: every leg reported it.
    """
    by_name = {leg["leg"]: leg for leg in legs}
    if set(by_name) != set(names):
        return False
    return all(
        not leg.get("crashed") and (not leg["problems"] or (not fault and not leg["expected"]))
        for leg in by_name.values()
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when a leg was not clean, or, with --fault, did not report it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="load, summed over all legs")
    parser.add_argument("--leg", choices=sorted(LEGS), action="append", help="default: all of the device")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="legs at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", choices=_FAULTS, default="", help="damage each leg: all must report it")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    names = given.leg or [name for name, leg in LEGS.items() if given.device in leg.devices]
    seconds = leg_seconds(names, given.minutes * 60)
    head = {key: value for key, value in vars(given).items() if key not in ("output", "leg")}
    legs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(given.processes) as pool:
        waiting = [
            pool.submit(run_leg, name, seconds[name], given.seed + number, fault=given.fault)
            for number, name in enumerate(names)
        ]
        for future in as_completed(waiting):
            legs.append(future.result())
            _say(legs[-1], given.fault)
            if given.output:
                text = json.dumps(head | {"legs": legs}, indent=1)
                given.output.write_text(text + "\n", encoding="utf-8")
    return int(not succeeded(legs, names, fault=given.fault))


def _say(leg: dict[str, Any], fault: str) -> None:
    verdict = "; ".join(problem[:_SAID] for problem in leg["problems"])
    verdict = verdict or ("detected" if fault else "clean")
    known = "" if leg.get("expected", True) else f"(not expected to be clean: {leg['reason']})"
    print(leg["leg"], verdict, known, leg.get("events"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
