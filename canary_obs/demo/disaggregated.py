"""`canary-obs demo --disaggregated`: one process prefills, another decodes; both report to one service."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from canary_obs.attach import install_canary
from canary_obs.config import CanaryConfig
from canary_obs.demo.plan import DemoPlan, Notify, canary_config, invitation, service_of
from canary_obs.demo.reference import IDLE_SECONDS, build_traffic, choose_device, preset_of
from canary_obs.demo.summary import RunTimes, summary_of
from canary_obs.engines.toolkit.attachment import memory_report
from canary_obs.engines.toolkit.service_process import ServiceProcess
from canary_obs.errors import ConfigurationError, KVCacheViolation
from canary_obs.reference_engine.disaggregated.cluster import Cluster
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import EngineConfig, tiny, with_model
from canary_obs.runtime.canary import CanaryRuntime

_END_SECONDS = 120.0
_PREFILL, _DECODE = 0, 1  # ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """What either process needs."""

    plan: DemoPlan
    config: CanaryConfig
    rendezvous: str  # URL at which the two processes find each other
    notify: Notify


class DecodeFailed(Exception):
    """The decode process ended early; it has written the reason to standard error."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"the decode process ended with exit code {exit_code}")


def run_disaggregated(plan: DemoPlan, notify: Notify) -> dict[str, Any]:
    """Run until the plan is fulfilled or Ctrl-C; returns a summary of each process.

    Raises ConfigurationError for an unknown model, DecodeFailed when the decode process failed.
    """
    with_model(tiny(), plan.model)  # an unknown one is refused before a process starts
    config = canary_config(plan)
    context = multiprocessing.get_context("spawn")
    with service_of(plan, config) as service, tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        role = _Role(plan=plan, config=config, rendezvous=rendezvous, notify=notify)
        receiver, sender = context.Pipe(duplex=False)
        decode = context.Process(target=_decode, args=(role, sender), daemon=True)
        decode.start()
        sender.close()
        try:
            return {"prefill": _prefill(role, service), "decode": receiver.recv()}
        except (RuntimeError, EOFError):
            if decode.is_alive() or not decode.exitcode:
                raise
            raise DecodeFailed(decode.exitcode) from None
        finally:
            decode.join(0 if sys.exc_info()[0] else _END_SECONDS)
            decode.terminate()


def _prefill(role: _Role, service: ServiceProcess | None) -> dict[str, Any]:
    plan = role.plan
    torch.set_num_threads(plan.threads)
    cluster = Cluster(_PREFILL, 1, 1, role.rendezvous)
    engine = cluster.engine(_engine_config(plan, _PREFILL))
    side, traffic = cluster.prefill_side(engine), build_traffic(engine, plan.seed, plan.arrivals)
    canary = _attach(engine, role.config, role.notify)
    if service is not None:
        role.notify(invitation(service))
    run = RunTimes(started=time.monotonic())
    try:
        while not plan.is_fulfilled(engine.statistics.steps, run.started):
            traffic.advance(side)
            if not side.has_work():
                time.sleep(IDLE_SECONDS)
            started = time.perf_counter()
            side.step()
            run.busy_seconds += time.perf_counter() - started
    except KeyboardInterrupt:
        pass  # how a demo without a limit ends
    while side.has_work():
        side.step()
    side.close()
    run.seconds = time.monotonic() - run.started
    return summary_of(run, engine, canary)


def _decode(role: _Role, sender: Connection) -> None:
    # Ctrl-C reaches every process of the terminal; this one ends when the prefill side closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(role.plan.threads)
    try:
        cluster = Cluster(_DECODE, 1, 1, role.rendezvous)
        engine = cluster.engine(_engine_config(role.plan, _DECODE))
        side = cluster.decode_side(engine)
        canary = _attach(engine, msgspec.structs.replace(role.config, rank=_DECODE), role.notify)
        run = RunTimes(started=time.monotonic())
        while side.has_work():
            started = time.perf_counter()
            side.step()
            run.busy_seconds += time.perf_counter() - started
        run.seconds = time.monotonic() - run.started
        sender.send(summary_of(run, engine, canary))
    except (KVCacheViolation, ConfigurationError) as stopped:
        sys.stderr.write(f"decode: {type(stopped).__name__}: {stopped}\n")
        sys.stderr.flush()
        # Not sys.exit: the other process waits for an answer that a slow end would delay.
        os._exit(1)


def _engine_config(plan: DemoPlan, rank: int) -> EngineConfig:
    device = choose_device(plan.device)
    if device.startswith("cuda"):
        # NCCL joins processes on different GPUs only.
        device = f"cuda:{rank}" if torch.cuda.device_count() > 1 else "cpu"
    preset = preset_of(plan.shape)(seed=plan.seed, device=device, checkpoint=plan.checkpoint)
    return with_model(preset, plan.model)


def _attach(engine: Engine, config: CanaryConfig, notify: Notify) -> CanaryRuntime | None:
    canary = install_canary(engine, config)
    if canary is not None:
        notify(f"rank {config.rank}: {memory_report(canary)}")
        canary.mark_ready()
    return canary
