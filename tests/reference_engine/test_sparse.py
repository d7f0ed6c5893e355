"""Sparse layers compute what the plain formulas say, and every index key and scale matters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from canary_kernels.layout import Part, Plane
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.model.llama import random_weights
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny, with_model
from tests.reference_engine.plain_llama import plain_logits
from tests.reference_engine.test_engine import prompt, recorded
from tests.reference_engine.workloads import drain


def engine_of(**changes: object) -> Engine:
    return Engine(with_model(tiny(**changes), "mla_sparse"))


@pytest.mark.parametrize("token_budget", [13, 64])
def test_outputs_equal_the_plain_formulas(token_budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(token_budget=token_budget)
    logits = recorded(engine, monkeypatch)
    for seed, length in enumerate((1, 10, 30, 70)):
        engine.add_request(prompt(seed, length), Sampling(max_tokens=8, stop_at_eos=False))
    finished = drain(engine)
    longest = max(finished, key=lambda request: request.length)
    branch = np.concatenate([longest.tokens[:64], prompt(9, 11)])
    engine.add_request(branch, Sampling(max_tokens=8, stop_at_eos=False))
    finished += drain(engine)
    assert engine.statistics.prefix_hit_tokens == 64
    shape, weights = engine.config.shape, random_weights(engine.config.shape, engine.config.seed)
    dense = replace(shape, sparse=None)
    for request in finished:
        tokens = request.tokens[: request.length].tolist()
        plain, without = plain_logits(shape, weights, tokens), plain_logits(dense, weights, tokens)
        for position in range(request.prompt_length - 1, request.length - 1):
            mine = logits[request.serial, position + 1].double()
            # An element at the border of two fp8 values may round otherwise in float32.
            torch.testing.assert_close(mine, plain[position], atol=1e-2, rtol=1e-2)
            assert position < shape.sparse.top_k or (mine - without[position]).norm() > 0.1


@pytest.mark.parametrize("kind", ["keys", "scales"])
def test_wrong_bytes_change_outputs(kind: str) -> None:
    def answer(damaged: bool) -> bytes:
        engine = engine_of()
        request = engine.add_request(prompt(5, 90), Sampling(max_tokens=16, stop_at_eos=False))
        while request.computed < 90:
            engine.step()
        if damaged:
            held = getattr(engine.runner.pool.index, kind)
            held.copy_(torch.randint(0, 100, held.shape, generator=torch.Generator().manual_seed(1)))
        drain(engine)
        return request.output.tobytes()

    assert answer(damaged=True) != answer(damaged=False)


def test_keys_and_scales_of_every_layer_are_a_group() -> None:
    full, indexer = ReferenceAdapter(engine_of()).groups
    assert (full.name, indexer.name) == ("full", "indexer")
    assert indexer.num_slots == full.num_slots
    found = [(source.layer, source.part, source.plane, source.slot_bytes) for source in indexer.sources]
    wanted = [(Part.K, Plane.DATA, 16), (Part.K, Plane.SCALES, 4)]
    assert found == [(layer, *rest) for layer in range(2) for rest in wanted]
    assert {source.page_size for source in indexer.sources} == {8}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"host_pages": 8}, "host tier"), ({"draft_layers": 1}, "draft model")],
)
def test_what_keeps_no_index_keys_is_refused(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        engine_of(**changes)


def test_an_indexer_needs_latent_rows() -> None:
    config = with_model(tiny(), "mla_sparse")
    with pytest.raises(ConfigurationError, match="the model has none"):
        Engine(replace(config, shape=replace(config.shape, latent=None)))
