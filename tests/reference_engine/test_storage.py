"""Each storage format: what it gives back, what the model makes of it; its sources are every byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from canary_kernels.fingerprint import plan_fingerprint
from canary_kernels.layout import Part, Plane, RealData
from canary_obs.demo.reference import build_engine
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.cache.quantised import largest, quantised
from canary_obs.reference_engine.cache.storage import LayerStore
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.model.llama import random_weights
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import KVFormat, tiny, with_model
from tests.reference_engine.plain_llama import plain_logits
from tests.reference_engine.test_engine import prompt, recorded
from tests.reference_engine.workloads import drain

PACKED = ("fp8", "int8", "mla")
KINDS = (torch.float8_e4m3fn, torch.int8)


def engine_of(model: str) -> Engine:
    return Engine(with_model(tiny(), model))


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_by_hand(kind: torch.dtype) -> None:
    vectors = torch.tensor([[[0.0, -2.0, 1.0, 0.5]], [[0.0, 0.0, 0.0, 0.0]]])
    elements, scales = quantised(vectors, kind)
    top = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}[kind]
    assert largest(kind) == top
    assert scales[0, 0] == torch.tensor(2.0) / top
    wanted = {torch.float8_e4m3fn: [0.0, -448.0, 224.0, 112.0], torch.int8: [0.0, -127.0, 64.0, 32.0]}[kind]
    assert elements[0, 0].float().tolist() == wanted
    assert elements[1].float().count_nonzero() == 0
    assert scales[1, 0] > 0


@pytest.mark.parametrize(("model", "step"), [("fp8", 2**-4), ("int8", 1 / 127)])
def test_what_is_read_is_what_was_written_within_the_step(model: str, step: float) -> None:
    store = engine_of(model).runner.pool.stores[1]
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([11, 0, 5])
    store.write(slots, key, value)
    for found, wanted in zip(store.read(slots), (key, value), strict=True):
        assert ((found - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * step).all()
        assert not torch.equal(found, wanted)


@pytest.mark.parametrize("model", PACKED)
def test_every_byte_held_is_a_source_and_changes_what_is_read(model: str) -> None:
    engine = engine_of(model)
    store: LayerStore = engine.runner.pool.stores[0]
    (group,) = ReferenceAdapter(engine).groups
    mine = [source for source in group.sources if source.layer == 0]
    assert sum(source.slot_bytes for source in mine) == sum(
        tensor[0].numel() * tensor.element_size() for tensor in store.tensors()
    )
    slots = torch.tensor([7])
    _, heads, size = store.tensors()[0].shape
    store.write(slots, torch.randn(1, heads, size), torch.randn(1, 2, 8))
    before = [found.clone() for found in store.read(slots)]
    for tensor in store.tensors():
        slot_bytes = tensor[7].reshape(-1).view(torch.uint8)
        for index in range(slot_bytes.numel()):
            kept = int(slot_bytes[index])
            slot_bytes[index] = kept ^ 0x40
            after = store.read(slots)
            assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)), (model, index)
            slot_bytes[index] = kept


@pytest.mark.parametrize("model", ["fp8", "int8"])
def test_scales_are_sources_of_their_own_plane(model: str) -> None:
    (group,) = ReferenceAdapter(engine_of(model)).groups
    places = {(source.layer, source.part, source.plane) for source in group.sources}
    assert places == set(itertools.product(range(2), (Part.K, Part.V), Plane))


def test_latent_rows_have_no_values() -> None:
    (group,) = ReferenceAdapter(engine_of("mla")).groups
    assert {source.part for source in group.sources} == {Part.K}
    assert {source.slot_bytes for source in group.sources} == {4 * (32 + 8)}


def test_latent_attention_equals_the_plain_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("mla")
    logits = recorded(engine, monkeypatch)
    for seed, length in enumerate((1, 17, 40)):
        engine.add_request(prompt(seed, length), Sampling(max_tokens=8, stop_at_eos=False))
    finished = drain(engine)
    again = engine.add_request(finished[2].tokens[:44], Sampling(max_tokens=4, stop_at_eos=False))
    finished += drain(engine)
    assert engine.statistics.prefix_hit_tokens >= 43
    assert finished[-1] is again
    config = engine.config
    weights = random_weights(config.shape, config.seed)
    for request in finished:
        plain = plain_logits(config.shape, weights, request.tokens[: request.length].tolist())
        for position in range(request.prompt_length - 1, request.length - 1):
            mine = logits[request.serial, position + 1].double()
            torch.testing.assert_close(mine, plain[position], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model", ["fp8", "int8"])
def test_quantised_outputs_are_near_the_plain_ones(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    logits = recorded(engine, monkeypatch)
    engine.add_request(prompt(1, 40), Sampling(max_tokens=1))
    (request,) = drain(engine)
    config = engine.config
    weights = random_weights(config.shape, config.seed)
    plain = plain_logits(config.shape, weights, request.tokens[:40].tolist())
    error = logits[request.serial, 40].double() - plain[39]
    assert 0 < error.norm() / plain[39].norm() < 0.1


@pytest.mark.parametrize("model", PACKED)
def test_a_wrong_byte_changes_outputs(model: str) -> None:
    def answer(damaged: int | None) -> bytes:
        engine = engine_of(model)
        request = engine.add_request(prompt(5, 30), Sampling(max_tokens=16, stop_at_eos=False))
        engine.step()
        if damaged is not None:
            tensor = engine.runner.pool.stores[1].tensors()[damaged]
            slot = torch.from_numpy(request.slots[:20])
            tensor.view(torch.uint8)[slot] = 0x35
        drain(engine)
        return np.ascontiguousarray(request.output).tobytes()

    right = answer(None)
    for number in range(len(engine_of(model).runner.pool.stores[1].tensors())):
        assert answer(number) != right


def test_combinations_that_cannot_be_stored_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="Use kv_format plain"):
        Engine(with_model(tiny(kv_format=KVFormat.INT8), "mla"))
    with pytest.raises(ConfigurationError, match="use --model llama"):
        build_engine("tiny", "cpu", 0, tmp_path, "mla")


@pytest.mark.parametrize("model", PACKED)
def test_coverage_is_complete(model: str) -> None:
    engine = engine_of(model)
    (group,) = ReferenceAdapter(engine).groups
    held = [tensor for store in engine.runner.pool.stores for tensor in store.tensors()]
    slot_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in held)
    assert plan_fingerprint(group.sources, RealData.ALL, "cpu").bytes_per_slot == slot_bytes
