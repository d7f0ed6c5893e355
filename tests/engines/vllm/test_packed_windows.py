"""Where packed rows of windows lie, confirmed by writing some; with vLLM's own: real/test_deepseek_v4.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_kernels.fingerprint import plan_fingerprint
from canary_kernels.fingerprint.reference import hash_slots
from canary_kernels.layout import RealData
from canary_obs.engines.vllm.packed_windows import packed_sources
from canary_obs.errors import UnsupportedEngine

BLOCKS, BLOCK, DATA, SCALES = 4, 16, 576, 8


class DeepseekV4SWACache(torch.nn.Module):
    """By this name vLLM's own is known."""

    bounded_replay, prefix = False, "a.swa_cache"

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(BLOCKS * 2 * BLOCK * (DATA + SCALES)).to(torch.uint8).view(BLOCKS, -1)
        rows = whole[:, : BLOCK * (DATA + SCALES)]  # other layers lie in the same blocks
        self.kv_cache = rows.view(BLOCKS, BLOCK, DATA + SCALES)


class Writer(torch.nn.Module):
    """An attention layer: data of all tokens of a block, then their scales."""

    head_dim, n_local_heads = 512, 2

    def __init__(self, cache: Any, *, rows: bool = False) -> None:
        super().__init__()
        self.swa_cache_layer, self.rows = cache, rows

    def _fused_qnorm_rope_kv_insert(self, q: Any, kv: Any, positions: Any, metadata: Any) -> None:
        given = metadata["a.swa_cache"]
        assert (q.shape, kv.shape, positions.tolist()) == ((1, 2, 512), (1, 512), [0])
        page, place = divmod(int(given.slot_mapping), given.block_size)
        pages = self.swa_cache_layer.kv_cache.view(BLOCKS, -1)
        if self.rows:
            pages[page, place * (DATA + SCALES) :][: DATA + SCALES] = 3
        else:
            pages[page, place * DATA :][:DATA] = 3
            pages[page, BLOCK * DATA + place * SCALES :][:SCALES] = 5


def runner(layer: Any, *writers: Any) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        model=torch.nn.ModuleList(writers),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


def test_a_slot_is_its_row_and_its_scales() -> None:
    layer = DeepseekV4SWACache()
    before = layer.kv_cache.clone()
    sources = packed_sources(runner(layer, Writer(layer), Writer(None)), "a", BLOCK, 7)
    assert sources is not None
    assert torch.equal(layer.kv_cache, before), "nor is the cache changed by finding out"
    assert {source.layer for source in sources} == {7}
    plan, every = plan_fingerprint(sources, RealData.ALL, torch.device("cpu")), torch.arange(BLOCKS * BLOCK)
    known, pages = hash_slots(plan, every), layer.kv_cache.view(BLOCKS, -1)
    pages[2, BLOCK * DATA + 5 * SCALES + 7] ^= 1  # a scale of slot 37
    pages[1, 3 * DATA] ^= 1  # the row of slot 19
    assert (hash_slots(plan, every) != known).any(1).nonzero().flatten().tolist() == [19, 37]


def test_rows_that_lie_elsewhere_are_left_out() -> None:
    layer = DeepseekV4SWACache()
    with pytest.raises(UnsupportedEngine, match="elsewhere than expected"):
        packed_sources(runner(layer, Writer(layer, rows=True)), "a", BLOCK, 7)


def test_what_cannot_be_confirmed_is_left_out() -> None:
    layer = DeepseekV4SWACache()
    with pytest.raises(UnsupportedEngine, match="2 layers write"):
        packed_sources(runner(layer, Writer(layer), Writer(layer)), "a", BLOCK, 7)
    layer.kv_cache = layer.kv_cache.view(torch.int8)
    with pytest.raises(UnsupportedEngine, match="not packed blocks of 16 tokens"):
        packed_sources(runner(layer, Writer(layer)), "a", BLOCK, 7)


def test_windows_that_are_computed_again_are_left_out() -> None:
    layer = DeepseekV4SWACache()
    layer.bounded_replay = True
    with pytest.raises(UnsupportedEngine, match="computed again"):
        packed_sources(runner(layer, Writer(layer)), "a", BLOCK, 7)


def test_other_layers_are_plain() -> None:
    assert packed_sources(runner(torch.nn.Identity()), "a", BLOCK, 7) is None
