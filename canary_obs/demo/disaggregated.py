"""`canary-obs demo --disaggregated`: one process prefills, another decodes; both report to one service."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from canary_obs.attach import install_canary
from canary_obs.config import CanaryConfig
from canary_obs.demo.reference import (
    IDLE_SECONDS,
    DemoPlan,
    Run,
    build_traffic,
    choose_device,
    config_of,
    invitation,
    is_done,
    preset_of,
    print_summary,
    say,
    summary_of,
)
from canary_obs.engines.toolkit.attachment import memory_report
from canary_obs.engines.toolkit.service_process import ServiceProcess
from canary_obs.errors import ConfigurationError, KVCacheViolation
from canary_obs.reference_engine.disaggregated.cluster import Cluster
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import EngineConfig, with_model
from canary_obs.runtime.canary import CanaryRuntime

_END_SECONDS = 120.0


def run_disaggregated(plan: DemoPlan) -> int:
    """Runs until the plan is fulfilled or Ctrl-C; prints a summary of both halves; returns the exit code."""
    config = config_of(plan)
    context = multiprocessing.get_context("spawn")
    service = ServiceProcess.start(config.endpoint, plan.port) if plan.serve else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = f"file://{Path(folder) / 'rendezvous'}"
            mine, theirs = context.Pipe()
            decode = context.Process(target=_decode, args=(plan, config, rendezvous, theirs), daemon=True)
            decode.start()
            theirs.close()
            try:
                prefilled = _prefill(plan, config, rendezvous, service)
                summary = {"prefill": prefilled, "decode": mine.recv()}
            except (RuntimeError, EOFError):
                if decode.is_alive() or not decode.exitcode:
                    raise
                return decode.exitcode  # it has said why
            finally:
                decode.join(0 if sys.exc_info()[0] else _END_SECONDS)
                decode.terminate()
    finally:
        if service is not None:
            service.stop()
    print_summary(plan, summary, config)
    return 0


def _prefill(
    plan: DemoPlan, config: CanaryConfig, rendezvous: str, service: ServiceProcess | None
) -> dict[str, Any]:
    torch.set_num_threads(plan.threads)
    cluster = Cluster(0, 1, 1, rendezvous)
    engine = cluster.engine(_engine_config(plan, 0))
    side, traffic = cluster.prefill_side(engine), build_traffic(engine, plan.seed, plan.arrivals)
    canary = _protected(plan, engine, config)
    if service is not None:
        say(plan, invitation(service.url))
    run = Run(started=time.monotonic())
    try:
        while not is_done(plan, run, engine):
            traffic.advance(side)
            if not side.has_work():
                time.sleep(IDLE_SECONDS)
            started = time.perf_counter()
            side.step()
            run.busy_seconds += time.perf_counter() - started
    except KeyboardInterrupt:
        pass  # how a demo without an end is meant to end
    while side.has_work():
        side.step()
    side.close()
    run.seconds = time.monotonic() - run.started
    return summary_of(run, engine, canary)


def _decode(plan: DemoPlan, config: CanaryConfig, rendezvous: str, pipe: Connection) -> None:
    # Ctrl-C reaches every process of the terminal; this one ends when the prefill side says so.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(plan.threads)
    try:
        cluster = Cluster(1, 1, 1, rendezvous)
        engine = cluster.engine(_engine_config(plan, 1))
        side = cluster.decode_side(engine)
        canary = _protected(plan, engine, msgspec.structs.replace(config, rank=1))
        run = Run(started=time.monotonic())
        while side.has_work():
            started = time.perf_counter()
            side.step()
            run.busy_seconds += time.perf_counter() - started
        run.seconds = time.monotonic() - run.started
        pipe.send(summary_of(run, engine, canary))
    except (KVCacheViolation, ConfigurationError) as stopped:
        sys.stderr.write(f"decode: {type(stopped).__name__}: {stopped}\n")
        sys.stderr.flush()
        # Not sys.exit: the other half waits for an answer that a slow end would delay.
        os._exit(1)


def _engine_config(plan: DemoPlan, rank: int) -> EngineConfig:
    device = choose_device(plan.device)
    if device.startswith("cuda"):
        # NCCL joins processes on different GPUs only.
        device = f"cuda:{rank}" if torch.cuda.device_count() > 1 else "cpu"
    preset = preset_of(plan.shape)(seed=plan.seed, device=device, checkpoint=plan.checkpoint)
    return with_model(preset, plan.model)


def _protected(plan: DemoPlan, engine: Engine, config: CanaryConfig) -> CanaryRuntime | None:
    canary = install_canary(engine, config)
    if canary is not None:
        say(plan, f"rank {config.rank}: {memory_report(canary)}")
        canary.mark_ready()
    return canary
