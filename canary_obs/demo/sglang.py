"""`canary-obs demo --engine sglang`: a tiny SGLang under load, with the canary attached by its plugin."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

from canary_obs.demo.in_process_sglang import InProcessSglang
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
from canary_obs.engines.sglang.scheduler_canary import canary_of
from canary_obs.runtime.canary import CanaryRuntime


def run_sglang_demo(plan: DemoPlan, notify: Notify, progress: Progress | None = None) -> dict[str, Any]:
    """Run until the plan is fulfilled or Ctrl-C; returns a summary of the run."""
    return run_installed(
        plan, notify, progress, ("sglang", "SGLang"),
        lambda folder, shown: _run(plan, InProcessSglang(folder, REQUESTS, plan.seed), shown),
    )  # fmt: skip


def _run(plan: DemoPlan, sglang: InProcessSglang, progress: Progress) -> dict[str, Any]:
    given = canary_of(sglang.scheduler)
    canary = None if given is None else given.runtime
    check_protected("SGLang", canary)
    load = _Load(plan, sglang, canary, progress)
    with suppress(KeyboardInterrupt):  # how a demo without a limit ends
        sglang.run(load.poll)
    summary = load_summary(sglang.steps, load.requests, load.busy_seconds)
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
        self._prefixes = [sglang.random_prompt(PREFIX_TOKENS) for _ in range(PREFIXES)]
        self._arrivals = arrivals(plan)
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
            time.sleep(IDLE_SECONDS)
        return True
