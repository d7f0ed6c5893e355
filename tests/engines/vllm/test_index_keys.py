"""Where the keys of sparse attention lie, confirmed by writing some."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from canary_kernels.fingerprint import plan_fingerprint
from canary_kernels.fingerprint.reference import hash_slots
from canary_kernels.layout import RealData
from canary_obs.engines.vllm.index_keys import index_sources
from canary_obs.errors import UnsupportedEngine
from tests.engines.vllm.index_key_writes import SIZE, by_rows, quant_and_cache, register


@pytest.fixture
def layer() -> SimpleNamespace:
    return SimpleNamespace(kv_cache=torch.arange(4 * 16 * (SIZE + 4)).to(torch.uint8).view(4, 16, SIZE + 4))


def confirmed(layer: SimpleNamespace, write: Callable[..., None]) -> tuple[object, ...]:
    library = register(write)
    try:
        return index_sources("a", layer, 16, 7)
    finally:
        library._destroy()


def test_keys_that_lie_elsewhere_are_left_out(layer: SimpleNamespace) -> None:
    """Nor is the cache changed by finding out."""
    before = layer.kv_cache.clone()
    with pytest.raises(UnsupportedEngine, match="elsewhere than expected"):
        confirmed(layer, by_rows)
    assert torch.equal(layer.kv_cache, before)


def test_a_slot_is_its_keys_and_its_scale(layer: SimpleNamespace) -> None:
    sources = confirmed(layer, quant_and_cache)
    assert {source.layer for source in sources} == {7}
    plan = plan_fingerprint(sources, RealData.ALL, torch.device("cpu"))
    every = torch.arange(4 * 16)
    before = hash_slots(plan, every)
    quant_and_cache(torch.randn(1, SIZE), layer.kv_cache, torch.tensor([37]), SIZE, "ue8m0")
    assert (hash_slots(plan, every) != before).any(1).nonzero().tolist() == [[37]]
    flat = layer.kv_cache.view(4, -1)
    flat[2, 16 * SIZE + 5 * 4] ^= 1  # the scale of slot 37
    flat[1, 3 * SIZE] ^= 1  # a key of slot 19
    assert (hash_slots(plan, every) != before).any(1).nonzero().flatten().tolist() == [19, 37]


@pytest.mark.parametrize("shape", [(4, 16, 4), (4, 8, SIZE + 4), (4, 16, 2, SIZE + 4)])
def test_other_shapes_are_left_out(shape: tuple[int, ...]) -> None:
    strange = SimpleNamespace(kv_cache=torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(UnsupportedEngine, match="not blocks of 16 tokens, one row each"):
        confirmed(strange, quant_and_cache)


def test_a_build_without_the_operation_cannot_confirm_them(layer: SimpleNamespace) -> None:
    with pytest.raises(UnsupportedEngine, match="cannot be confirmed"):
        index_sources("a", layer, 16, 7)
