"""`canary-obs demo`: the reference engine under traffic, the canary inside, the service beside."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, PREFIX, CanaryConfig, load, masked
from canary_obs.engines.toolkit.attachment import memory_report
from canary_obs.engines.toolkit.service_process import ServiceProcess
from canary_obs.errors import ConfigurationError
from canary_obs.records import Snapshot
from canary_obs.reference_engine import settings as presets
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.swa_divergence import log as swa_log

IDLE_SECONDS = 0.005
_RSS_FROM_STEP = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What the command line asked for."""

    duration: float | None
    steps: int | None
    seed: int
    json: bool
    serve: bool
    port: int | None
    arrivals: float | None
    shape: str
    model: str
    device: str
    threads: int
    checkpoint: Path | None
    overrides: dict[str, Any]
    disaggregated: bool = False


def config_of(plan: DemoPlan) -> CanaryConfig:
    """The canary's settings: without a service, snapshots go nowhere."""
    overrides = dict(plan.overrides)
    if not plan.serve and f"{PREFIX}ENDPOINT" not in os.environ:
        overrides.setdefault("endpoint", IN_PROCESS)
    return load(CanaryConfig, overrides=overrides)


def run_demo(plan: DemoPlan) -> int:
    """Runs until the plan is fulfilled or Ctrl-C; prints a summary; returns the exit code."""
    config = config_of(plan)
    # Small matrices: a second OpenMP thread spins more than it helps wherever cores are shared.
    torch.set_num_threads(plan.threads)
    # The one line of the engine's log that is made to be parsed.
    swa_log.addHandler(logging.StreamHandler())
    swa_log.setLevel(logging.INFO)
    engine = build_engine(plan.shape, plan.device, plan.seed, plan.checkpoint, plan.model)
    traffic = build_traffic(engine, plan.seed, plan.arrivals)
    service = ServiceProcess.start(config.endpoint, plan.port) if plan.serve else None
    try:
        canary = install_canary(engine, config)
        if canary is not None:
            say(plan, memory_report(canary))
            canary.mark_ready()
        if service is not None:
            say(plan, invitation(service.url))
        run = _drive(plan, engine, traffic)
        summary = summary_of(run, engine, canary)
    finally:
        if service is not None:
            service.stop()
    print_summary(plan, summary, config)
    return 0


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
    """The default load of an engine, at another arrival rate on wish."""
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


@dataclass(slots=True, kw_only=True)
class Run:
    """How long a demo ran."""

    started: float
    seconds: float = 0.0
    busy_seconds: float = 0.0
    rss_early: int | None = None


def _drive(plan: DemoPlan, engine: Engine, traffic: Traffic) -> Run:
    run = Run(started=time.monotonic())
    try:
        while not is_done(plan, run, engine):
            traffic.advance(engine)
            if engine.has_work():
                started = time.perf_counter()
                engine.step()
                run.busy_seconds += time.perf_counter() - started
            elif not engine.idle():
                time.sleep(IDLE_SECONDS)
            if run.rss_early is None and engine.statistics.steps >= _RSS_FROM_STEP:
                run.rss_early = resident_bytes()
    except KeyboardInterrupt:
        pass  # how a demo without an end is meant to end
    run.seconds = time.monotonic() - run.started
    return run


def is_done(plan: DemoPlan, run: Run, engine: Engine) -> bool:
    """Whether the plan is fulfilled."""
    if plan.steps is not None and engine.statistics.steps >= plan.steps:
        return True
    return plan.duration is not None and time.monotonic() - run.started >= plan.duration


def summary_of(run: Run, engine: Engine, canary: CanaryRuntime | None) -> dict[str, Any]:
    """What a run did and what the canary says of it, after a last check of everything."""
    statistics = engine.statistics
    names = (
        "steps",
        "requests_finished",
        "tokens",
        "prefix_hit_tokens",
        "evictions",
        "preemptions",
        "aborts",
    )
    summary: dict[str, Any] = {name: getattr(statistics, name) for name in names}
    summary |= {
        "seconds": round(run.seconds, 3),
        "step_ms": round(1e3 * run.busy_seconds / max(statistics.steps, 1), 3),
        "device": engine.config.device,
        "rss_growth_bytes": None if run.rss_early is None else resident_bytes() - run.rss_early,
    }
    if canary is None:
        return summary | {"state": "off", "violations": 0, "slots_verified": 0, "bytes_verified": 0,
                          "sweep_passes": 0, "overhead_ratio": 0.0}  # fmt: skip
    overhead = sum(canary.overhead.values())
    canary.check_everything()
    state, reasons = canary.verdict()
    final = canary.detach()
    return (
        summary
        | _checks(final, canary)
        | {
            "state": state.value,
            "state_reasons": list(reasons),
            "overhead_ratio": round(overhead / max(run.busy_seconds, 1e-9), 4),
            "overhead_ms": {
                name: round(1e3 * spent / max(final.step, 1), 4) for name, spent in canary.overhead.items()
            },
            "ledger": canary.injector.injections.summary() if canary.injector else None,
        }
    )


def _checks(final: Snapshot, canary: CanaryRuntime) -> dict[str, Any]:
    verified = hashed = 0
    reasons: dict[str, int] = {}
    for group in canary.state.groups:
        counters = final.groups[group.name]
        verified += sum(counters.verified.values())
        hashed += sum(counters.hashed.values()) * group.plan.bytes_per_slot
        for by_reason in counters.violations.values():
            for reason, count in by_reason.items():
                reasons[reason.value] = reasons.get(reason.value, 0) + count
    return {
        "slots_verified": verified,
        "bytes_verified": hashed,
        "slots_unverified": sum(sum(group.unverified.values()) for group in final.groups.values()),
        "sweep_passes": sum(final.sweep_passes.values()),
        "patrol_cycles": final.patrol.cycles if final.patrol else 0,
        "violations": sum(reasons.values()),
        "violations_by_reason": {reason: count for reason, count in reasons.items() if count},
        "record_bytes": canary.state.record_bytes,
        "backend": final.backend,
        "observer_faults": final.observer_faults,
        "swa_divergence": msgspec.to_builtins(final.swa_divergence),
    }


def print_summary(plan: DemoPlan, summary: dict[str, Any], config: CanaryConfig) -> None:
    """One JSON line, or a list to read."""
    if plan.json:
        sys.stdout.write(json.dumps(summary) + "\n")
        return
    for name, value in summary.items():
        sys.stdout.write(f"{name:>20}  {value}\n")
    sys.stdout.write(f"{'settings':>20}  {masked(config)}\n")


def say(plan: DemoPlan, text: str) -> None:
    """Words beside the summary."""
    stream = sys.stderr if plan.json else sys.stdout
    stream.write(text + "\n")
    stream.flush()


def invitation(url: str) -> str:
    """Requests to try against a service."""
    return (
        f"service at {url}\n"
        f"  curl {url}/metrics\n"
        f"  curl -X POST '{url}/canary/sweep?wait=true'\n"
        f"  curl {url}/canary/status\n"
        "Ctrl-C ends the demo."
    )


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not tell."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * 4096
