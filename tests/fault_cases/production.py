"""Every fault class at the settings of production: python -m tests.fault_cases.production.

Time is virtual, so that nothing depends on the machine: an engine step takes 20 ms, each reading of a clock
1 ms (which makes the patrol as slow as it is in a large pool), and idle time passes in steps of 50 ms.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.records import Violation
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from tests.fault_cases.case import FaultCase
from tests.fault_cases.stage import SEED, STEPS, Stage, received
from tests.fault_cases.table import PRODUCTION, collected
from tests.links import OneThreadLink

STEP_SECONDS, READING_SECONDS, IDLE_SECONDS = 0.02, 1e-3, 0.05
_MOST_STEPS = 4 * STEPS
_IDLE_LIMIT = 60.0  # seconds: several idle sweeps and patrol cycles
DEFAULTS = CanaryConfig(endpoint=IN_PROCESS)


class Clock:
    """Stands in for the clocks of `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        self.now += READING_SECONDS
        return self.now

    @contextmanager
    def running(self) -> Iterator[Clock]:
        """While entered, time.monotonic and time.perf_counter are this clock."""
        with (
            mock.patch.object(time, "monotonic", self.read),
            mock.patch.object(time, "perf_counter", self.read),
        ):
            yield self


def observe(case: FaultCase) -> dict[str, object]:
    """When and how the default settings see a fault: {"signal", "after"}; an empty signal = not seen."""
    with Clock().running() as clock:
        stage, found, idle = _play(case, clock)
    if not found:
        return {"signal": [], "after": "not seen"}
    first = found[0].step
    signal = sorted({f"{row.phase} {row.reason}" for row in found if row.step == first})
    assert stage.struck is not None
    steps = first - stage.struck
    after = f"{idle:.0f} s idle" if idle is not None else f"{steps} steps"
    return {"signal": signal, "after": after}


def _play(case: FaultCase, clock: Clock) -> tuple[Stage, list[Violation], float | None]:
    """Traffic, then rest, until a violation arrives; idle seconds before it, None = during traffic."""
    torch.manual_seed(SEED)
    sizes = {name: value for name, value in case.engine.items() if name != "model"}
    engine = Engine(
        settings.with_model(settings.tiny(seed=SEED, **sizes), str(case.engine.get("model", "llama")))
    )
    stage = Stage(engine)
    if case.furnish is not None:
        case.furnish(stage)
    stage.trust_every_free()
    case.plant(stage)
    link = OneThreadLink(capacity=1 << 20)
    canary = stage.canary = install_canary(engine, DEFAULTS, link=link)
    assert canary is not None
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), SEED)
    for step in range(_MOST_STEPS):
        if step < STEPS:
            traffic.advance(engine)
        elif not engine.scheduler.running and not engine.scheduler.waiting:
            break
        engine.step()
        clock.now += STEP_SECONDS
        if found := received(link):
            return stage, found, None
    rested = clock.now
    while clock.now < rested + _IDLE_LIMIT:
        engine.idle()
        clock.now += IDLE_SECONDS
        if found := received(link):
            return stage, found, clock.now - rested
    assert not canary.health.faults
    canary.detach()
    return stage, received(link), None


def main() -> None:
    """Write what each fault class shows."""
    found = {}
    for name, case in collected().items():
        found[name] = observe(case)
        sys.stdout.write(f"{name}: {found[name]}\n")
    PRODUCTION.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
