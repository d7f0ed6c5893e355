"""Coverage is a share of what the engine has, not of what its adapter shows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from canary_kernels.layout import Part
from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.coverage import KVCoverage
from canary_obs.vocabulary import State
from tests.unchecked import Report

LAYERS, BYTES = "layers with KV in", "of KV bytes protected, target"


def attached(model: str, hide: Any = None, group: str = "full", **tiny: Any) -> tuple[CanaryRuntime, float]:
    """A canary whose adapter hides sources of one group, and the seconds since it was attached."""
    engine = Engine(settings.with_model(settings.tiny(seed=1, **tiny), model))
    adapter = ReferenceAdapter(engine)
    if hide is not None:
        found = adapter._groups[group]
        found.view = replace(found.view, sources=tuple(filter(hide, found.view.sources)))
    started = time.monotonic()
    canary = install_canary(adapter, CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    canary.mark_ready()
    canary.detach()
    canary.run.armed = True  # the verdict of one that is attached
    return canary, started


@pytest.mark.parametrize("model", settings.MODELS)
def test_everything_is_covered(model: str) -> None:
    canary, _ = attached(model)
    assert canary.state.coverage == 1.0
    assert canary.verdict() == (State.OK, ())


@pytest.mark.parametrize(
    ("model", "group", "layer", "expected"),
    [
        ("llama", "full", 0, "the model has 2 layers with KV in full, the adapter shows 1"),
        ("mla", "full", 1, "the model has 2 layers with KV in full, the adapter shows 1"),
        ("speculative", "draft", 0, "the model has 1 layers with KV in draft, the adapter shows 0"),
        ("mla_sparse", "indexer", 0, "the model has 2 layers with KV in indexer, the adapter shows 1"),
        ("compressed", "c4", 2, "the model has 1 layers with KV in c4, the adapter shows 0"),
    ],
)
def test_a_hidden_layer(unchecked: Report, model: str, group: str, layer: int, expected: str) -> None:
    layers = {
        source.layer
        for source in ReferenceAdapter(Engine(settings.with_model(settings.tiny(seed=1), model)))
        ._groups[group]
        .view.sources
    }
    hidden = layer if layer in layers else min(layers)
    canary, started = attached(model, lambda source: source.layer != hidden, group)
    verdict = canary.verdict()
    assert canary.state.coverage < 1.0
    assert verdict[0] is State.DEGRADED
    assert expected in verdict[1]
    if model == "llama":
        seconds = time.monotonic() - started
        unchecked("the adapter hides a layer", "reference", verdict, names=LAYERS, seconds=seconds)


def test_a_hidden_part(unchecked: Report) -> None:
    canary, started = attached("llama", lambda source: source.part is not Part.V)
    verdict = canary.verdict()
    assert verdict == (State.DEGRADED, (f"50.0% {BYTES} 99.0%",))
    seconds = time.monotonic() - started
    unchecked("the adapter hides V", "reference", verdict, names=BYTES, seconds=seconds)


def test_a_hidden_group() -> None:
    engine = Engine(settings.with_model(settings.tiny(seed=1), "swa"))
    adapter = ReferenceAdapter(engine)
    adapter._groups.pop("swa")
    canary = install_canary(adapter, CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    canary.mark_ready()
    assert canary.state.coverage < 0.99
    assert "the model has 1 layers with KV in swa, the adapter shows 0" in canary.verdict()[1]
    canary.detach()


def test_what_an_adapter_left_out_is_degraded_whatever_its_share() -> None:
    allocation = KVAllocation(bytes=1, layers={}, left_out=("group 1 is not checked (0.1% of KV bytes)",))
    (reason,) = KVCoverage([], allocation).reasons()
    assert reason == (State.DEGRADED, "group 1 is not checked (0.1% of KV bytes)")


def test_an_engine_that_does_not_say_what_it_has(unchecked: Report) -> None:
    engine = Engine(settings.tiny(seed=1))
    adapter = ReferenceAdapter(engine)
    adapter.allocation = lambda: None  # type: ignore[method-assign, return-value, assignment]
    started = time.monotonic()
    canary = install_canary(adapter, CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    canary.mark_ready()
    names = "this engine does not say what KV it has"
    seconds = time.monotonic() - started
    unchecked(
        "the engine does not say what KV it has", "reference", canary.verdict(), names=names, seconds=seconds
    )
    canary.detach()
