"""One leg in this process: python -m tests.engines.vllm.storm.leg NAME SECONDS SEED RESULT.json [--fault]"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engines.vllm.storm.legs import LEGS, Leg

_ALWAYS = ("finished", "aborts")  # events of every leg
_STEPS_PER_SECOND = 0.2


def prepare(leg: Leg, folder: Path) -> str:
    """Environment of an engine with its own service; returns the service's URL. Before importing vLLM."""
    from canary_obs.engines.toolkit.service_process import free_port

    port = free_port()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1", VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
        KV_CANARY_MODE="log", KV_CANARY_SERVE="auto", KV_CANARY_PORT=str(port),
        KV_CANARY_ENDPOINT=f"ipc://{folder}/s.sock", KV_CANARY_LOG_FILE=str(folder / "service.jsonl"),
        VLLM_USE_V2_MODEL_RUNNER=str(int(leg.runner == "V2")),
    )  # fmt: skip
    if leg.runner == "V2":
        import torch

        if not torch.cuda.is_available():
            from tests.engines.vllm.real.interpreted import stand_in_driver

            os.environ["TRITON_INTERPRET"] = "1"
            stand_in_driver()
    return f"http://127.0.0.1:{port}"


def run(name: str, seconds: float, seed: int, *, fault: bool, folder: Path) -> dict[str, Any]:
    """Load the leg's engine for `seconds` and say what was seen."""
    leg = LEGS[name]
    url = prepare(leg, folder)
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig
    from tests.engines.vllm.storm.load import Load
    from tests.engines.vllm.storm.watch import Watch

    rig = Rig(make_model(folder, leg.model), **leg.engine)
    canary = rig.canary
    load = Load(rig, seed, leg.prompts)
    watch = Watch(canary.verdict, canary.run.ready_at, leg.states, url)
    watch.start()
    deadline = time.monotonic() + seconds
    if fault:
        load.busy_until(time.monotonic() + seconds / 3)
        load.drain()
        rig.layer_cache(0, 0)[rig.idle_blocks()[0]].zero_()
        time.sleep(seconds / 3)
    (load.alternate_until if leg.rests else load.busy_until)(deadline)
    load.drain()
    rig.step()
    if "connector_loads" in leg.contains:
        from tests.engines.vllm.real.copying_connector import LOADS

        load.events["connector_loads"] = LOADS["blocks"]
    seen = watch.stop()
    final = canary.detach()
    groups = {
        group: {
            "verified": sum(counters.verified.values()),
            "unverified": {str(cause): count for cause, count in counters.unverified.items() if count},
            "hashed": sum(counters.hashed.values()),
            "violations": sum(sum(found.values()) for found in counters.violations.values()),
        }
        for group, counters in final.groups.items()
    }
    result = {
        "leg": name, "runner": leg.runner, "model": leg.model, "seconds": round(seconds, 1), "seed": seed,
        "events": dict(load.events), "steps": final.step, "groups": groups,
        "sweeps": {str(key): count for key, count in final.sweep_passes.items()},
        "patrol_cycles": final.patrol.cycles if final.patrol else 0,
        "violations": [repr(violation)[:600] for violation in rig.found[:20]],
        "observer_faults": final.observer_faults, "rows_dropped": final.violation_events_dropped,
        "messages_dropped": final.messages_dropped, "watch": asdict(seen),
        "service_log": _warnings(folder / "service.jsonl"),
    }  # fmt: skip
    rig.close()
    return result | {"problems": problems(leg, result)}


def problems(leg: Leg, result: dict[str, Any]) -> list[str]:
    """Why a leg is not clean, or did not contain what it claims; empty = clean."""
    events, watch = result["events"], result["watch"]
    found = [f"{name}: {result[name]}" for name in _MUST_BE_EMPTY if result[name]]
    found += [f"warnings: {watch['warnings']}"] if watch["warnings"] else []
    found += [f"states: {watch['bad']}"] if watch["bad"] else []
    found += [
        f"no {event}" for event in (*_ALWAYS, *_HITS[leg.prefix_hits], *leg.contains) if not events.get(event)
    ]
    if leg.rests and result["seconds"] > 120 and not sum(result["sweeps"].values()):
        found.append("no sweep passed")
    if events["steps"] < _STEPS_PER_SECOND * result["seconds"] or not watch["samples"]:
        found.append(f"only {events['steps']} steps, {watch['samples']} samples")
    if not watch["scrapes"]:
        found.append("the service was never scraped")
    if any(group["violations"] for group in result["groups"].values()):
        found.append("violations were counted")
    return found


_HITS = {True: ("hit_tokens",), False: ()}
_MUST_BE_EMPTY = ("violations", "observer_faults", "rows_dropped", "messages_dropped", "service_log")


def _warnings(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line[:500] for line in lines if json.loads(line).get("level") not in (None, "info", "debug")][:20]


def main() -> None:
    """Exit code 0 even for a leg that is not clean: the result says it."""
    name, seconds, seed, output = sys.argv[1:5]
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        result = run(name, float(seconds), int(seed), fault="--fault" in sys.argv, folder=Path(folder))
    Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
