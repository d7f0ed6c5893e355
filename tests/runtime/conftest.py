"""A tiny engine under traffic with a canary inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.transport.links import EngineLink


@dataclass(slots=True)
class Rig:
    engine: Engine
    traffic: Traffic
    canary: CanaryRuntime

    def run(self, steps: int) -> None:
        target = self.engine.statistics.steps + steps
        while self.engine.statistics.steps < target:
            self.traffic.advance(self.engine)
            if self.engine.has_work():
                self.engine.step()

    def finish_requests(self) -> None:
        while self.engine.has_work():
            self.engine.step()


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make(
        *,
        seed: int = 3,
        link: EngineLink | None = None,
        engine: dict[str, object] | None = None,
        model: str = "llama",
        **changes: object,
    ) -> Rig:
        runner = Engine(settings.with_model(settings.tiny(seed=seed, **(engine or {})), model))
        config = CanaryConfig(**({"endpoint": IN_PROCESS} | changes))  # type: ignore[arg-type]
        canary = install_canary(runner, config, link=link)
        assert canary is not None
        canary.mark_ready()
        rig = Rig(
            runner,
            Traffic(scaled_traffic(runner.config.max_context, runner.config.max_running), seed),
            canary,
        )
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.canary.detach()
