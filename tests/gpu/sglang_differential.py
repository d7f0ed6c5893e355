"""SGLang's own canary and ours on the same engines, and what each says of the same faults, on a GPU.

    python3 -m tests.gpu.sglang_differential --output FILE [FAULT ...]

Two engines side by side: SGLang's canary as shipped, and with what it leaves off. The faults are those of
tests/engines/sglang/real/faults.py for plain pools. Exit status 1: SGLang's canary reports what ours does
not, one of both speaks before a fault, or a fault was not planted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.engine_process import EngineProcess
from canary_obs.bench.environment import environment
from tests.engines.sglang.real.differential import HEAD, Outcome
from tests.engines.sglang.real.faults import FAULTS
from tests.engines.sglang.real.sglang_canary import MORE

ROOT = Path(__file__).parents[2]
_ENTRY_POINTS = "[sglang.srt.plugins]\nkv_canary_planting = tests.gpu.sglang_planting:register\n"
_ALWAYS = {
    "KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": "inproc",
    # Faults leave the engine's lists wrong until its cache is emptied; it would end by its own checks.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    "SGLANG_KV_CANARY_RING_CAPACITY": "65536",  # rows that SGLang's canary logs in an engine's life
}  # fmt: skip
_ENGINES: dict[str, dict[str, str]] = {"as_shipped": {}, "with_all": MORE}
_LEAST = 20


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shape", default="small", help="of canary_obs.demo.in_process_vllm.SHAPES")
    parser.add_argument("--engine", action="append", choices=tuple(_ENGINES), help="all by default")
    given = parser.parse_args()
    plain = [fault for fault in FAULTS if fault.model == "llama" and not fault.settings and not fault.run]
    chosen = [fault for fault in plain if not given.faults or fault.name in given.faults]
    names = given.engine or list(_ENGINES)
    figures: dict[str, Any] = {"environment": environment(), "engines": {}, "outcomes": [], "wrong": []}
    figures["unfinished"] = "an engine ended"
    print(HEAD, end="")
    with TemporaryDirectory() as folder, ExitStack() as opened:
        plugin = Path(folder, "kv_canary_planting-0.dist-info")
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-canary-planting\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text(_ENTRY_POINTS)
        paths = os.pathsep.join([folder, str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        engines = {
            name: opened.enter_context(
                EngineProcess(
                    "tests.gpu.sglang_planted_engine", {"shape": given.shape},
                    _ALWAYS | _ENGINES[name] | {"PYTHONPATH": paths},
                )
            )
            for name in names
        }  # fmt: skip
        figures["engines"] = {name: engine.answer() for name, engine in engines.items()}
        for fault in chosen:
            found = {
                name: engine.ask(fault.name, int(fault.cached))["outcome"] for name, engine in engines.items()
            }
            add_outcome(figures, fault, found)
            given.output.write_text(json.dumps(figures, indent=1), "utf-8")
    del figures["unfinished"]
    least = min(_LEAST, len(given.faults)) if given.faults else _LEAST
    if len(figures["outcomes"]) < least:
        figures["wrong"].append(f"{len(figures['outcomes'])} faults of at least {least} were compared")
    given.output.write_text(json.dumps(figures, indent=1), "utf-8")
    for line in figures["wrong"]:
        print(line, file=sys.stderr)
    return 1 if figures["wrong"] else 0


def add_outcome(figures: dict[str, Any], fault: Any, found: dict[str, Any]) -> None:
    """One fault, as each engine's two canaries saw it."""
    wrong = []
    for name, outcome in found.items():
        if outcome is None or "ours" not in outcome:
            wrong.append(f"{fault.name}, {name}: not planted, or the engine ended before it was seen")
        elif outcome["before"] or outcome["faults"]:
            wrong.append(f"{fault.name}, {name}: reported before the fault, or a fault of ours: {outcome}")
        elif (outcome["theirs"] and not outcome["ours"]) or (outcome["unnamed"] and fault.same_slots):
            wrong.append(f"{fault.name}, {name}: ours is silent: {outcome}")
    figures["wrong"] += wrong
    figures["outcomes"].append({"fault": fault.name, **found})
    if set(found) == set(_ENGINES):
        print(_row(fault.name, found), end="", flush=True)


def _row(name: str, found: dict[str, Any]) -> str:
    """Of the table that docs/sglang.md has of a CPU."""
    theirs = {engine: (outcome or {}).get("theirs", []) for engine, outcome in found.items()}
    ours = sorted({tuple(pair) for outcome in found.values() for pair in (outcome or {}).get("ours", [])})
    return Outcome(name=name, ours=ours, unnamed=[], **theirs).row()  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
