"""`canary-obs demo --engine sglang`: a tiny SGLang under load, with the canary attached by its plugin."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.config import PREFIX
from canary_obs.demo.in_process_sglang import InProcessSglang
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
from canary_obs.engines.sglang.scheduler_canary import canary_of
from canary_obs.errors import ConfigurationError, UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime

_REQUESTS = 16  # that run together
_PREFIXES, _PREFIX_TOKENS = 4, 200  # beginnings that prompts share
_ARRIVALS = 0.2  # requests per step
_IDLE_SECONDS = 0.005


def run_sglang_demo(plan: DemoPlan, notify: Notify, progress: Progress | None = None) -> dict[str, Any]:
    """Run until the plan is fulfilled or Ctrl-C; returns a summary of the run."""
    if find_spec("sglang") is None:
        raise ConfigurationError(
            "--engine", "sglang", "SGLang is not installed", "Install sglang, or use --engine reference."
        )
    config = canary_config(plan)
    export_settings(plan, config)
    progress = Progress() if progress is None else progress
    with service_of(plan, config, progress) as service, TemporaryDirectory() as folder:
        if service is not None:
            notify(invitation(service))
        progress.stage("starting SGLang with a tiny model; its plugin attaches the canary")
        return _run(plan, InProcessSglang(Path(folder), _REQUESTS, plan.seed), progress)


def _run(plan: DemoPlan, sglang: InProcessSglang, progress: Progress) -> dict[str, Any]:
    given = canary_of(sglang.scheduler)
    canary = None if given is None else given.runtime
    if canary is None and os.environ[PREFIX + "MODE"] != "none":
        raise UnsupportedEngine("this SGLang is not protected; its log above has the reason")
    load = _Load(plan, sglang, canary, progress)
    with suppress(KeyboardInterrupt):  # how a demo without a limit ends
        sglang.run(load.poll)
    summary: dict[str, Any] = {
        "steps": sglang.steps,
        "requests": load.requests,
        "step_ms": round(1e3 * load.busy_seconds / max(sglang.steps, 1), 3),
    }
    if canary is None:
        return summary | {"state": "off"}
    canary.check_everything()
    return summary | canary_summary(canary, canary.detach, load.busy_seconds)


class _Load:
    """Requests that arrive as SGLang's loop polls for them."""

    def __init__(
        self, plan: DemoPlan, sglang: InProcessSglang, canary: CanaryRuntime | None, progress: Progress
    ) -> None:
        self._plan, self._sglang, self._canary, self._progress = plan, sglang, canary, progress
        self._draw = random.Random(plan.seed)
        self._prefixes = [sglang.random_prompt(_PREFIX_TOKENS) for _ in range(_PREFIXES)]
        self._arrivals = _ARRIVALS if plan.arrivals is None else min(plan.arrivals, 1.0)
        self._started = time.monotonic()
        self._busy_since: float | None = None
        self.requests, self.busy_seconds = 0, 0.0

    def poll(self) -> bool:
        """What came since the call before; False = the plan is fulfilled."""
        sglang, draw = self._sglang, self._draw
        if self._busy_since is not None:
            self.busy_seconds += time.perf_counter() - self._busy_since
        self._progress.running(self._started, sglang.steps, self._canary)
        if self._plan.is_fulfilled(sglang.steps, self._started):
            return False
        if draw.random() < self._arrivals:
            question = sglang.random_prompt(draw.randrange(8, 64))
            sglang.add_request(draw.choice(self._prefixes) + question, draw.randrange(8, 64))
            self.requests += 1
        if sglang.has_work():
            self._busy_since = time.perf_counter()
        else:
            self._busy_since = None
            time.sleep(_IDLE_SECONDS)
        return True
