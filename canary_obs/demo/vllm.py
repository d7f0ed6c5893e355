"""`canary-obs demo --engine vllm`: a tiny vLLM under load, with the canary attached by its plugin."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from canary_obs.demo.in_process_vllm import InProcessVllm, tiny_vllm
from canary_obs.demo.installed_engine import (
    IDLE_SECONDS,
    PREFIX_TOKENS,
    PREFIXES,
    REQUESTS,
    arrivals,
    check_protected,
    load_summary,
    run_installed,
)
from canary_obs.demo.plan import DemoPlan, Notify, Progress
from canary_obs.demo.summary import canary_summary
from canary_obs.engines.vllm.worker import attached_adapter, detach_from_worker, runtime_of
from canary_obs.records import Snapshot
from canary_obs.runtime.canary import CanaryRuntime


def run_vllm_demo(plan: DemoPlan, notify: Notify, progress: Progress | None = None) -> dict[str, Any]:
    """Run until the plan is fulfilled or Ctrl-C; returns a summary of the run."""
    return run_installed(
        plan, notify, progress, ("vllm", "vLLM"), lambda folder, shown: _run(plan, folder, shown)
    )


def _run(plan: DemoPlan, folder: Path, progress: Progress) -> dict[str, Any]:
    vllm = tiny_vllm(folder, REQUESTS, plan.seed)
    canary = runtime_of(vllm.worker)
    check_protected("vLLM", canary)
    steps, requests, busy_seconds = _generate_load(plan, vllm, canary, progress)
    summary = load_summary(steps, requests, busy_seconds)
    summary |= _canary_summary(vllm, canary, busy_seconds) if canary else {"state": "off"}
    vllm.shutdown()
    return summary


def _generate_load(
    plan: DemoPlan, vllm: InProcessVllm, canary: CanaryRuntime | None, progress: Progress
) -> tuple[int, int, float]:
    """Returns engine steps, requests added, and seconds spent in steps."""
    draw = random.Random(plan.seed)
    prefixes = vllm.random_prompts(PREFIXES, PREFIX_TOKENS)
    share = arrivals(plan)
    steps, requests, busy_seconds = 0, 0, 0.0
    started = time.monotonic()
    try:
        while not plan.is_fulfilled(steps, started):
            if draw.random() < share:
                (question,) = vllm.random_prompts(1, draw.randrange(8, 64))
                vllm.add_requests([draw.choice(prefixes) + question], draw.randrange(8, 64))
                requests += 1
            if vllm.has_work():
                busy_seconds += vllm.run_steps(1)
                steps += 1
            else:
                time.sleep(IDLE_SECONDS)
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
