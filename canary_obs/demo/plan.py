"""What a demo is asked to do, and the settings and the service that follow from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canary_obs.config import FILE_VARIABLE, IN_PROCESS, PREFIX, CanaryConfig, load
from canary_obs.engines.toolkit.service_process import ServiceProcess
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.vocabulary import State

# Receives text for the user while a demo runs. Picklable: the disaggregated demo hands it to a child process.
Notify = Callable[[str], None]
_MOMENT_SECONDS = 0.5
_SWEEP_INTERVAL = 200  # steps; the demo's own default, so that sweeps are seen within a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A demo as it is now."""

    seconds: float  # since its load began
    steps: int  # of the engine
    state: str  # "off" without a canary
    reason: str  # the first that keeps the state from ok; empty = none


class Progress:
    """Receives what a demo is doing. This one shows nothing."""

    _next = 0.0

    def stage(self, text: str) -> None:
        """What is being started."""

    def moment(self, now: Moment) -> None:
        """The demo as it is now."""

    def running(self, started: float, steps: int, canary: CanaryRuntime | None) -> None:
        """After each step: twice a second it is a moment. `started`: monotonic time."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _MOMENT_SECONDS
        state, reasons = (State.OFF, ()) if canary is None else canary.verdict()
        reason = reasons[0] if reasons else ""
        self.moment(Moment(seconds=now - started, steps=steps, state=state.value, reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The load, the engine and the service of a demo."""

    duration: float | None = None  # seconds; None = no limit
    steps: int | None = None  # engine steps; None = no limit
    seed: int = 0
    serve: bool = False  # start the service as a child process
    port: int | None = None  # of that service; None = KV_CANARY_PORT
    arrivals: float | None = None  # requests per step; None = the engine's default load
    shape: str = "demo"
    model: str = "llama"
    device: str = "auto"
    threads: int = 1
    checkpoint: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # fields of CanaryConfig that were given

    def is_fulfilled(self, steps: int, started: float) -> bool:
        """Whether a demo that started at monotonic time `started` has run long enough."""
        if self.steps is not None and steps >= self.steps:
            return True
        return self.duration is not None and time.monotonic() - started >= self.duration


def canary_settings(plan: DemoPlan) -> dict[str, Any]:
    """The plan's settings, with the demo's defaults: a sweep every 200 steps, no service to report to."""
    settings = dict(plan.settings)
    if not {f"{PREFIX}SWEEP_INTERVAL", FILE_VARIABLE} & os.environ.keys():
        settings.setdefault("sweep_interval", _SWEEP_INTERVAL)
    if not plan.serve and f"{PREFIX}ENDPOINT" not in os.environ:
        settings.setdefault("endpoint", IN_PROCESS)
    return settings


def canary_config(plan: DemoPlan) -> CanaryConfig:
    """The canary's configuration. Raises ConfigurationError."""
    return load(CanaryConfig, overrides=canary_settings(plan))


def export_settings(plan: DemoPlan, config: CanaryConfig) -> None:
    """Into the environment, where an engine's plugin reads them; `config` is the plan's configuration."""
    settings = canary_settings(plan) | {"endpoint": config.endpoint}
    os.environ |= {PREFIX + name.upper(): str(value) for name, value in settings.items()}
    os.environ.setdefault(PREFIX + "MODE", config.mode.value)


@contextmanager
def service_of(
    plan: DemoPlan, config: CanaryConfig, progress: Progress | None = None
) -> Iterator[ServiceProcess | None]:
    """The service that the plan asks for, ready to answer, stopped at the end; None when it asks for none."""
    if not plan.serve:
        yield None
        return
    if progress is not None:
        progress.stage("starting the service")
    service = ServiceProcess.start(config.endpoint, plan.port)
    try:
        yield service
    finally:
        service.stop()


def invitation(service: ServiceProcess) -> str:
    """Requests to try against a service."""
    url = service.url
    return (
        f"service at {url}\n"
        f"  console: open {url}/ in a browser\n"
        f"  canary-obs status --url {url}\n"
        f"  canary-obs sweep --wait --url {url}\n"
        f"  curl {url}/metrics\n"
        f"  curl -X POST '{url}/canary/sweep?wait=true'\n"
        f"  curl {url}/canary/status\n"
        "Ctrl-C ends the demo."
    )
