"""docs/reference_engine.md names the models that a disaggregated demo sends, and those that it refuses."""

from __future__ import annotations

import re
from pathlib import Path

from canary_obs.demo.disaggregated import check_model
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import MODELS, tiny, with_model

PAGE = (Path(__file__).parents[2] / "docs/reference_engine.md").read_text("utf-8")


def named(sentence: str) -> set[str]:
    """Models in backticks between the start of a sentence and the next full stop or colon."""
    text = " ".join(PAGE.split())
    return set(re.findall(r"`(\w+)`", re.split(r"[.:)] ?", text.split(sentence, 1)[1], maxsplit=1)[0]))


def refused(model: str) -> bool:
    try:
        check_model(model)
    except ConfigurationError:
        return True
    return False


def test_every_model_is_sent_or_refused_as_the_page_says() -> None:
    assert named("--disaggregated` sends the KV of") == {model for model in MODELS if not refused(model)}
    assert named("It refuses") == {model for model in MODELS if refused(model)}


def test_pools_without_an_axis_of_heads_are_those_named() -> None:
    flat = set()
    for model in filter(lambda model: not refused(model), MODELS):
        engine = Engine(with_model(tiny(), model))
        tensors = [tensor for store in engine.runner.pool.stores for tensor in store.tensors()]
        if any(tensor.dim() < 3 or tensor.shape[1] != len(engine.kv_heads) for tensor in tensors):
            flat.add(model)
    assert named("axis of heads (") == flat
