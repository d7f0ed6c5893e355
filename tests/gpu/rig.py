"""A small engine on the GPU under load, with a canary attached."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.transport.links import EngineLink

HOOKS = ("before_write", "forward_launched", "after_forward", "after_step")


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
    link: EngineLink | None = None,
    **changes: object,
) -> Rig:
    preset = settings.tiny(seed=seed, **{"device": "cuda", **(engine or {})})  # type: ignore[arg-type]
    built = Engine(settings.with_model(preset, model))
    built.runner.__class__ = runner
    config = CanaryConfig(endpoint=IN_PROCESS, **changes)  # type: ignore[arg-type]
    canary = install_canary(built, config, link=link)
    assert canary is not None
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(built.config.max_context, built.config.max_running), seed)
    return Rig(built, traffic, canary)


def refuse_waits(canary: CanaryRuntime, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """From now on a hook that waits for the device raises; returns the calls of each hook, kept current."""
    calls = dict.fromkeys(HOOKS, 0)

    def guard(name: str) -> None:
        hook = getattr(canary, name)

        def call(*arguments: object) -> None:
            calls[name] += 1
            with waits_refused():
                hook(*arguments)

        monkeypatch.setattr(canary, name, call)

    for name in HOOKS:
        guard(name)
    return calls


@contextmanager
def waits_refused() -> Iterator[None]:
    """Inside, whatever waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype, once per process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
