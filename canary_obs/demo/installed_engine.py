"""What demos of installed engines, vLLM and SGLang, have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.config import PREFIX
from canary_obs.demo.plan import (
    DemoPlan,
    Notify,
    Progress,
    canary_config,
    export_settings,
    invitation,
    service_of,
)
from canary_obs.errors import ConfigurationError, UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime

REQUESTS = 16  # that run together
PREFIXES, PREFIX_TOKENS = 4, 200  # beginnings that prompts share
IDLE_SECONDS = 0.005
_ARRIVALS = 0.2  # requests per step


def run_installed(
    plan: DemoPlan,
    notify: Notify,
    progress: Progress | None,
    names: tuple[str, str],
    run: Callable[[Path, Progress], dict[str, Any]],
) -> dict[str, Any]:
    """What `run` returns, with its plan's settings in the environment and its service running.

    `names`: of the engine's package, and as people write it. `run` is given a folder for a model.
    Raises ConfigurationError where the engine is not installed.
    """
    package, name = names
    if find_spec(package) is None:
        raise ConfigurationError(
            "--engine", package, f"{name} is not installed", f"Install {package}, or use --engine reference."
        )
    config = canary_config(plan)
    export_settings(plan, config)
    progress = Progress() if progress is None else progress
    with service_of(plan, config, progress) as service, TemporaryDirectory() as folder:
        if service is not None:
            notify(invitation(service))
        progress.stage(f"starting {name} with a tiny model; its plugin attaches the canary")
        return run(Path(folder), progress)


def check_protected(name: str, canary: CanaryRuntime | None) -> None:
    """Raises UnsupportedEngine where a canary was asked for and is not there."""
    if canary is None and os.environ[PREFIX + "MODE"] != "none":
        raise UnsupportedEngine(f"this {name} is not protected; its log above has the reason")


def arrivals(plan: DemoPlan) -> float:
    """Requests per step, at most one."""
    return _ARRIVALS if plan.arrivals is None else min(plan.arrivals, 1.0)


def load_summary(steps: int, requests: int, busy_seconds: float) -> dict[str, Any]:
    """Of an engine's steps."""
    return {
        "steps": steps,
        "requests": requests,
        "step_ms": round(1e3 * busy_seconds / max(steps, 1), 3),
    }
