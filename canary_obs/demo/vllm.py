"""`canary-obs demo --engine vllm`: a tiny vLLM under load, with the canary attached by its plugin."""

from __future__ import annotations

import os
import random
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.config import PREFIX
from canary_obs.demo.in_process_vllm import InProcessVllm, tiny_vllm
from canary_obs.demo.plan import (
    DemoPlan,
    Notify,
    Progress,
    canary_config,
    export_settings,
    invitation,
    service_of,
)
from canary_obs.demo.summary import canary_summary
from canary_obs.engines.vllm.worker import attached_adapter, detach_from_worker, runtime_of
from canary_obs.errors import ConfigurationError, UnsupportedEngine
from canary_obs.records import Snapshot
from canary_obs.runtime.canary import CanaryRuntime

_REQUESTS = 16  # that run together
_PREFIXES, _PREFIX_TOKENS = 4, 200  # beginnings that prompts share
_ARRIVALS = 0.2  # requests per step
_IDLE_SECONDS = 0.005


def run_vllm_demo(plan: DemoPlan, notify: Notify, progress: Progress | None = None) -> dict[str, Any]:
    """Run until the plan is fulfilled or Ctrl-C; returns a summary of the run."""
    if find_spec("vllm") is None:
        raise ConfigurationError(
            "--engine", "vllm", "vLLM is not installed", "Install vllm, or use --engine reference."
        )
    config = canary_config(plan)
    export_settings(plan, config)
    progress = Progress() if progress is None else progress
    with service_of(plan, config, progress) as service, TemporaryDirectory() as folder:
        if service is not None:
            notify(invitation(service))
        progress.stage("starting vLLM with a tiny model; its plugin attaches the canary")
        return _run(plan, Path(folder), progress)


def _run(plan: DemoPlan, folder: Path, progress: Progress) -> dict[str, Any]:
    vllm = tiny_vllm(folder, _REQUESTS, plan.seed)
    canary = runtime_of(vllm.worker)
    if canary is None and os.environ[PREFIX + "MODE"] != "none":
        raise UnsupportedEngine("this vLLM is not protected; its log above has the reason")
    steps, requests, busy_seconds = _generate_load(plan, vllm, canary, progress)
    summary: dict[str, Any] = {
        "steps": steps,
        "requests": requests,
        "step_ms": round(1e3 * busy_seconds / max(steps, 1), 3),
    }
    summary |= _canary_summary(vllm, canary, busy_seconds) if canary else {"state": "off"}
    vllm.shutdown()
    return summary


def _generate_load(
    plan: DemoPlan, vllm: InProcessVllm, canary: CanaryRuntime | None, progress: Progress
) -> tuple[int, int, float]:
    """Returns engine steps, requests added, and seconds spent in steps."""
    draw = random.Random(plan.seed)
    prefixes = vllm.random_prompts(_PREFIXES, _PREFIX_TOKENS)
    arrivals = _ARRIVALS if plan.arrivals is None else min(plan.arrivals, 1.0)
    steps, requests, busy_seconds = 0, 0, 0.0
    started = time.monotonic()
    try:
        while not plan.is_fulfilled(steps, started):
            if draw.random() < arrivals:
                (question,) = vllm.random_prompts(1, draw.randrange(8, 64))
                vllm.add_requests([draw.choice(prefixes) + question], draw.randrange(8, 64))
                requests += 1
            if vllm.has_work():
                busy_seconds += vllm.run_steps(1)
                steps += 1
            else:
                time.sleep(_IDLE_SECONDS)
            progress.running(started, steps, canary)
    except KeyboardInterrupt:
        pass  # how a demo without a limit ends
    return steps, requests, busy_seconds


def _canary_summary(vllm: InProcessVllm, canary: CanaryRuntime, busy_seconds: float) -> dict[str, Any]:
    adapter = attached_adapter(vllm.worker)
    with adapter.paused():  # else the idle thread would check at the same time
        canary.check_everything()

    def detach() -> Snapshot:
        final = detach_from_worker(vllm.worker)
        assert final is not None
        return final

    return canary_summary(canary, detach, busy_seconds)
