"""docs/reference_engine.md names the pools that cannot be divided among ranks."""

from __future__ import annotations

import re
from pathlib import Path

from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import MODELS, tiny, with_model

PAGE = (Path(__file__).parents[2] / "docs/reference_engine.md").read_text("utf-8")


def named(sentence: str) -> set[str]:
    """Models in backticks between the start of a sentence and the next full stop or colon."""
    text = " ".join(PAGE.split())
    return set(re.findall(r"`(\w+)`", re.split(r"[.:)] ?", text.split(sentence, 1)[1], maxsplit=1)[0]))


def test_pools_without_an_axis_of_heads_are_those_named() -> None:
    flat = set()
    for model in MODELS:
        engine = Engine(with_model(tiny(), model))
        pool = engine.runner.pool
        tensors = [tensor for store in pool.stores for tensor in store.tensors()]
        if pool.compressed or any(t.dim() < 3 or t.shape[1] != len(engine.kv_heads) for t in tensors):
            flat.add(model)
    assert named("axis of heads (") == flat
