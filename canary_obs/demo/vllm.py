"""`canary-obs demo --engine vllm`: a tiny vLLM under traffic, the canary inside, the service beside."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.config import PREFIX
from canary_obs.demo.reference import DemoPlan, config_of, invitation
from canary_obs.engines.toolkit.service_process import ServiceProcess
from canary_obs.errors import ConfigurationError, UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime

_REQUESTS, _PREFIXES, _PREFIX_TOKENS = 16, 4, 200
_IDLE_SECONDS = 0.005


def run_vllm_demo(plan: DemoPlan) -> int:
    """Runs until the plan is fulfilled or Ctrl-C; prints a summary; returns the exit code."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigurationError(
            "--engine", "vllm", "vLLM is not installed", "Install vllm, or use --engine reference."
        )
    config = config_of(plan)
    # The plugin reads the environment, as it does in any vLLM.
    settings = dict(plan.overrides) | {"endpoint": config.endpoint}
    os.environ |= {PREFIX + name.upper(): str(value) for name, value in settings.items()}
    os.environ.setdefault(PREFIX + "MODE", config.mode.value)
    service = ServiceProcess.start(config.endpoint, plan.port) if plan.serve else None
    try:
        if service is not None:
            sys.stderr.write(invitation(service.url) + "\n")
        with TemporaryDirectory() as folder:
            summary = _drive(plan, Path(folder))
    finally:
        if service is not None:
            service.stop()
    if plan.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        sys.stdout.writelines(f"{name:>20}  {value}\n" for name, value in summary.items())
    return 0


def _drive(plan: DemoPlan, folder: Path) -> dict[str, Any]:
    from canary_obs.bench.vllm import TinyVllm
    from canary_obs.engines.vllm.worker import runtime_of

    tiny = TinyVllm(folder, _REQUESTS, plan.seed)
    canary = runtime_of(tiny.worker)
    if canary is None and os.environ[PREFIX + "MODE"] != "none":
        raise UnsupportedEngine("this vLLM is not protected; the log above says why")
    draw = random.Random(plan.seed)
    prefixes = [tiny.prompt(_PREFIX_TOKENS) for _ in range(_PREFIXES)]
    chance = 0.2 if plan.arrivals is None else min(plan.arrivals, 1.0)
    steps, asked, busy = 0, 0, 0.0
    started = time.monotonic()
    try:
        while not _done(plan, steps, started):
            if draw.random() < chance:
                tiny.ask(draw.choice(prefixes) + tiny.prompt(draw.randrange(8, 64)), draw.randrange(8, 64))
                asked += 1
            if tiny.engine.has_unfinished_requests():
                busy += tiny.steps(1)
                steps += 1
            else:
                time.sleep(_IDLE_SECONDS)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
    summary: dict[str, Any] = {
        "steps": steps,
        "requests": asked,
        "step_ms": round(1e3 * busy / max(steps, 1), 3),
    }
    summary |= _protection(canary, busy) if canary else {"state": "off"}
    tiny.core.shutdown()
    return summary


def _protection(canary: CanaryRuntime, busy: float) -> dict[str, Any]:
    from canary_obs.runtime.report.snapshot import counters_of

    overhead = sum(canary.overhead.values())
    groups = counters_of(canary)
    state, reasons = canary.verdict()
    return {
        "slots_verified": sum(sum(group.verified.values()) for group in groups.values()),
        "sweep_passes": sum(canary.sweeper.passes.values()),
        "violations": canary.counter_reader.violations,
        "state": state.value,
        "state_reasons": list(reasons),
        "overhead_ratio": round(overhead / max(busy, 1e-9), 4),
    }


def _done(plan: DemoPlan, steps: int, started: float) -> bool:
    if plan.steps is not None and steps >= plan.steps:
        return True
    return plan.duration is not None and time.monotonic() - started >= plan.duration
