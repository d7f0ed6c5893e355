"""`canary-obs demo`: the reference engine under load, with the canary attached."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from canary_obs.attach import install_canary
from canary_obs.demo.plan import DemoPlan, Notify, Progress, canary_config, invitation, service_of
from canary_obs.demo.summary import RunTimes, resident_bytes, summary_of
from canary_obs.engines.toolkit.attachment import memory_report
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine import settings as presets
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.swa_divergence import log as swa_log

IDLE_SECONDS = 0.005
_WARM_STEPS = 2000  # after which memory should no longer grow


def run_demo(plan: DemoPlan, notify: Notify, progress: Progress | None = None) -> dict[str, Any]:
    """Run until the plan is fulfilled or Ctrl-C; returns a summary of the run."""
    config = canary_config(plan)
    # Small matrices: a second OpenMP thread spins more than it helps wherever cores are shared.
    torch.set_num_threads(plan.threads)
    # The one line of the engine's log that is made to be parsed.
    swa_log.addHandler(logging.StreamHandler())
    swa_log.setLevel(logging.INFO)
    progress = Progress() if progress is None else progress
    progress.stage(f"building a small engine: {plan.model}, preset {plan.shape}")
    engine = build_engine(plan.shape, plan.device, plan.seed, plan.checkpoint, plan.model)
    traffic = build_traffic(engine, plan.seed, plan.arrivals)
    with service_of(plan, config, progress) as service:
        progress.stage("attaching the canary; where its checks are not compiled yet, that takes some seconds")
        canary = install_canary(engine, config)
        if canary is not None:
            notify(memory_report(canary))
            canary.mark_ready()
        if service is not None:
            notify(invitation(service))
        run = _run(plan, engine, traffic, canary, progress)
        return summary_of(run, engine, canary)


def build_engine(
    shape: str, device: str, seed: int, checkpoint: Path | None = None, model: str = "llama"
) -> Engine:
    """An engine from a preset. Raises ConfigurationError for an unknown preset, model or device."""
    chosen = choose_device(device)
    if chosen.startswith("cuda:"):
        torch.cuda.set_device(chosen)  # Triton launches on the current device
    preset = preset_of(shape)(seed=seed, device=chosen, checkpoint=checkpoint)
    return Engine(presets.with_model(preset, model))


def preset_of(shape: str) -> Callable[..., presets.EngineConfig]:
    """Raises ConfigurationError for an unknown preset."""
    makers = {"demo": presets.demo, "tiny": presets.tiny}
    if shape not in makers:
        raise ConfigurationError("--shape", shape, "no such preset", f"Use {' or '.join(makers)}.")
    return makers[shape]


def build_traffic(engine: Engine, seed: int, arrivals: float | None = None) -> Traffic:
    """The engine's default load; `arrivals` (requests per step) overrides its rate."""
    usual = scaled_traffic(engine.config.max_context, engine.config.max_running)
    return Traffic(usual if arrivals is None else replace(usual, arrivals=arrivals), seed)


def choose_device(name: str) -> str:
    """`auto` is CUDA where there is one. Raises ConfigurationError for a device that is not here."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError("--device", name, "not a device", "Use auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigurationError(
            "--device", name, f"this machine has {found} CUDA devices", "Use auto or cpu."
        )
    return name


def _run(
    plan: DemoPlan, engine: Engine, traffic: Traffic, canary: CanaryRuntime | None, progress: Progress
) -> RunTimes:
    run = RunTimes(started=time.monotonic())
    try:
        while not plan.is_fulfilled(engine.statistics.steps, run.started):
            traffic.advance(engine)
            if engine.has_work():
                started = time.perf_counter()
                engine.step()
                run.busy_seconds += time.perf_counter() - started
            elif not engine.idle():
                time.sleep(IDLE_SECONDS)
            progress.running(run.started, engine.statistics.steps, canary)
            if run.rss_early is None and engine.statistics.steps >= _WARM_STEPS:
                run.rss_early = resident_bytes()
    except KeyboardInterrupt:
        pass  # how a demo without a limit ends
    run.seconds = time.monotonic() - run.started
    return run
