"""One engine under a canary and a soak's disturbances, and what it reports at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine.engine import Engine

SIZES = {"max_context": 1024, "num_slots": 8192, "max_running": 12, "token_budget": 256}
STORM, PRESSURE = 0.01, 0.05  # probabilities per step
BATCH = 100  # steps between looks at the counters


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """One engine under traffic. Checks are of slots: records by the chain, bytes by their hash."""

    model: str
    steps: int
    requests: int  # finished; the decode process finishes only what it received
    seconds: float
    records_checked: int
    bytes_checked: int
    unverified: int
    violations: int
    sweep_passes: int
    evictions: int
    preemptions: int
    aborts: int
    storms: int
    storm_aborts: int  # requests that storms dropped, wherever they waited
    state: str
    observer_faults: int


class Instrumented:
    """The engine; `abort` drops a request from it by id, wherever it waits."""

    def __init__(self, engine: Engine, abort: Callable[[str], bool], seed: int) -> None:
        config = CanaryConfig(
            endpoint=IN_PROCESS, sweep_interval=100, patrol_budget="2%", prefix_data=False,
            write_history=False,
        )  # fmt: skip
        canary = install_canary(engine, config)
        assert canary is not None
        canary.mark_ready()
        self._engine, self._abort, self._canary = engine, abort, canary
        self._draw = np.random.default_rng(seed)
        self._storms = self._dropped = 0
        self._started = time.monotonic()

    @property
    def records_checked(self) -> int:
        """So far, over all phases."""
        # On the CPU: no copy, no wait.
        counters = self._canary.state.counters.view(-1, layout.COUNTER_WORDS)
        return int(counters[:, layout.COUNT_VERIFIED : layout.COUNT_VERIFIED + layout.NUM_PHASES].sum())

    def disturb(self, unfinished: Iterable[str]) -> None:
        """Now and then abort most of these requests, or evict a part of the cache."""
        config, scheduler = self._engine.config, self._engine.scheduler
        if self._draw.random() < PRESSURE:
            pages = int(self._draw.integers(1, 1 + config.num_slots // config.page_size // 2))
            taken = scheduler.take(pages)
            if taken is not None:
                scheduler.allocator.free(taken)
        if self._draw.random() < STORM:
            self._storms += 1
            for request in list(unfinished):
                if self._draw.random() < 0.8:
                    self._dropped += self._abort(request)

    def finish(self, model: str) -> KindReport:
        """Check every record, leave the engine, and tell."""
        self._canary.check_everything()
        state = self._canary.verdict()[0]
        final, statistics = self._canary.detach(), self._engine.statistics
        groups = final.groups.values()
        return KindReport(
            model=model,
            steps=statistics.steps,
            requests=statistics.requests_finished,
            seconds=round(time.monotonic() - self._started, 1),
            records_checked=sum(sum(group.verified.values()) for group in groups),
            bytes_checked=sum(sum(group.hashed.values()) for group in groups),
            unverified=sum(sum(group.unverified.values()) for group in groups),
            violations=sum(sum(sum(by.values()) for by in group.violations.values()) for group in groups),
            sweep_passes=sum(final.sweep_passes.values()),
            evictions=statistics.evictions,
            preemptions=statistics.preemptions,
            aborts=statistics.aborts,
            storms=self._storms,
            storm_aborts=self._dropped,
            state=state.value,
            observer_faults=sum(final.observer_faults.values()),
        )
