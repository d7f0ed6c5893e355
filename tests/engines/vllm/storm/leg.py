"""One leg in this process: python -m tests.engines.vllm.storm.leg NAME SECONDS SEED RESULT.json [FAULT]"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.storm.legs import LEGS, ON_GPU, Leg
from tests.engines.vllm.storm.problems import problems, undetected

_SPARE = 60.0  # seconds after a busy engine's sweep is due


def prepare(leg: Leg, folder: Path) -> str:
    """Environment of an engine with its own service; returns the service's URL. Before importing vLLM."""
    from canary_obs.engines.toolkit.service_process import free_port

    for name in [name for name in os.environ if name.upper().startswith("KV_CANARY_")]:
        del os.environ[name]  # the settings of production, whatever this storm was started with
    port = free_port()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1", VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
        KV_CANARY_MODE="log", KV_CANARY_SERVE="auto", KV_CANARY_PORT=str(port),
        KV_CANARY_ENDPOINT=f"ipc://{folder}/s.sock", KV_CANARY_LOG_FILE=str(folder / "service.jsonl"),
        VLLM_USE_V2_MODEL_RUNNER=str(int(leg.runner == "V2")),
    )  # fmt: skip
    if leg.runner == "V2" and not torch.cuda.is_available():
        from tests.engines.vllm.real.interpreted import stand_in_driver

        os.environ["TRITON_INTERPRET"] = "1"
        stand_in_driver()
    return f"http://127.0.0.1:{port}"


def _make_rig(leg: Leg, folder: Path) -> Any:
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig, keep_asynchronous

    engine = leg.engine | (ON_GPU | leg.on_gpu if torch.cuda.is_available() else {})
    if leg.asynchronous:
        keep_asynchronous()
    if leg.draft:
        engine["speculative_config"] = {
            "method": "draft_model", "model": str(make_model(folder, leg.draft)), "num_speculative_tokens": 3,
        }  # fmt: skip
    return Rig(make_model(folder, leg.model), **engine)


def run(name: str, seconds: float, seed: int, *, fault: str, folder: Path) -> dict[str, Any]:
    """Load the leg's engine for `seconds` and say what was seen."""
    leg = LEGS[name]
    url = prepare(leg, folder)
    from tests.engines.vllm.storm.faults import FAULTS
    from tests.engines.vllm.storm.load import Load
    from tests.engines.vllm.storm.watch import Watch

    rig = _make_rig(leg, folder)
    canary = rig.canary
    load = Load(rig, seed, leg.prompts, leg.repeats)
    watch = Watch(canary.verdict, canary.run.ready_at, leg.states, url)
    watch.start()
    before_fault, started = 0, time.monotonic()
    deadline = started + seconds
    if fault:
        load.busy_until(started + seconds / 3)
        load.drain()
        before_fault = len(rig.found)
        FAULTS[fault][0](rig)
        time.sleep(seconds / 3)
    (load.alternate_until if leg.rests else load.busy_until)(deadline)
    loaded = time.monotonic() - started
    load.drain()
    rig.step()
    seen = watch.stop()
    config = rig.llm.llm_engine.vllm_config.scheduler_config
    final = canary.detach()
    found = {
        "leg": name, "runner": leg.runner, "model": leg.model, "seconds": round(seconds, 1), "seed": seed,
        "expected": leg.expected, "reason": leg.reason, "loaded_seconds": round(loaded, 1),
        "longest_pause": round(load.longest_pause, 2), "async_scheduling": bool(config.async_scheduling),
        "scheduler": type(rig.core.scheduler).__name__, "events": load.counts(), "swept": load.swept,
        "busy_sweep_after": _busy_sweep_after(canary.config), "watch": asdict(seen),
        "violations": [repr(violation)[:600] for violation in rig.found[:20]], "before_fault": before_fault,
        "reasons": sorted({violation.reason.value for violation in rig.found}),
        "service_log": _warnings(folder / "service.jsonl"),
    }  # fmt: skip
    result = found | _numbers(final)
    rig.close()
    return result | {"problems": undetected(result, FAULTS[fault][1]) if fault else problems(leg, result)}


def _numbers(final: Any) -> dict[str, Any]:
    """What the rank's last snapshot counted."""
    groups = {
        group: {
            "verified": sum(counters.verified.values()),
            "unverified": {str(cause): count for cause, count in counters.unverified.items() if count},
            "hashed": sum(counters.hashed.values()),
            "violations": sum(sum(found.values()) for found in counters.violations.values()),
        }
        for group, counters in final.groups.items()
    }
    return {
        "groups": groups, "steps": final.step,
        "forwards": final.forwards, "forwards_checked": final.forwards_checked,
        "sweeps": {str(key): count for key, count in final.sweep_passes.items()},
        "patrol_cycles": final.patrol.cycles if final.patrol else 0,
        "observer_faults": final.observer_faults, "rows_dropped": final.violation_events_dropped,
        "messages_dropped": final.messages_dropped,
    }  # fmt: skip


def _busy_sweep_after(config: Any) -> float | None:
    """Seconds after which an engine that is never idle should have swept; None = never."""
    if not getattr(config, "busy_sweep", False):
        return None
    return float(config.sweep_max_age_seconds) / 2 + _SPARE


def _warnings(path: Path) -> list[str]:
    if not path.exists():
        return ["the service has no log"]
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line[:500] for line in lines if json.loads(line).get("level") not in (None, "info", "debug")][:20]


def main() -> None:
    """Exit code 0 even for a leg that is not clean: the result says it."""
    name, seconds, seed, output, *fault = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        result = run(name, float(seconds), int(seed), fault="".join(fault), folder=Path(folder))
    Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
