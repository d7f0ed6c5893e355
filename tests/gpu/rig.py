"""A small engine on the GPU under traffic, with a canary inside."""

from __future__ import annotations

from dataclasses import dataclass

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.reference import settings
from canary_obs.engines.reference.engine import Engine
from canary_obs.engines.reference.runner import Runner
from canary_obs.engines.reference.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime


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


def make_rig(
    *,
    seed: int = 3,
    model: str = "llama",
    engine: dict[str, object] | None = None,
    runner: type[Runner] = Runner,
    **changes: object,
) -> Rig:
    preset = settings.tiny(seed=seed, **{"device": "cuda", **(engine or {})})  # type: ignore[arg-type]
    built = Engine(settings.with_model(preset, model))
    built.runner.__class__ = runner
    canary = install_canary(built, CanaryConfig(endpoint=IN_PROCESS, **changes))  # type: ignore[arg-type]
    assert canary is not None
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(built.config.max_context, built.config.max_running), seed)
    return Rig(built, traffic, canary)
