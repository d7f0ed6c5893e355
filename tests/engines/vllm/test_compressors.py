"""Where compressors write, confirmed by writing; with vLLM's own: real/test_deepseek_v4.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_kernels.fingerprint import plan_fingerprint
from canary_kernels.fingerprint.reference import hash_slots
from canary_kernels.layout import RealData
from canary_obs.engines.vllm.compressors import compressed_by, entry_sources, state_sources
from canary_obs.engines.vllm.packed_windows import packed_sources
from canary_obs.errors import UnsupportedEngine

BLOCKS, ENTRIES, RATIO, STATES, WIDTH = 5, 64, 4, 2, 6
_CONTEXT: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def override(context: Any) -> Iterator[None]:
        _CONTEXT["metadata"] = context.attn_metadata
        yield
        del _CONTEXT["metadata"]

    names = SimpleNamespace(override_forward_context=override)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", names)
    metadata = SimpleNamespace(CompressorMetadata=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v4.compressor", metadata)


class CompressorStateCache(torch.nn.Module):
    """By this name vLLM's own is known."""

    prefix = "a.compressor.state_cache"

    def __init__(self) -> None:
        super().__init__()
        # Other groups' layers lie in the same blocks.
        whole = torch.arange(BLOCKS * (STATES * WIDTH + 4), dtype=torch.float32).view(BLOCKS, -1)
        self.kv_cache = whole[:, : STATES * WIDTH].view(BLOCKS, STATES, WIDTH)


class Compressor(torch.nn.Module):
    """Keeps a row of each token, and writes an entry with the last one of a run."""

    k_cache_prefix, compress_ratio = "a", RATIO

    def __init__(self, entries: torch.Tensor, defect: str) -> None:
        super().__init__()
        self.state_cache, self.entries, self.defect = CompressorStateCache(), entries, defect

    def forward(self, scores: torch.Tensor, positions: torch.Tensor, rotary: Any) -> None:
        assert rotary == "rotary"
        given = _CONTEXT["metadata"][self.state_cache.prefix]
        assert given.token_to_req_indices.tolist() == [0] * len(positions)
        for place, slot in enumerate(given.slot_mapping.tolist()):
            row = self.state_cache.kv_cache[slot // given.block_size, slot % given.block_size]
            row.copy_(scores[place] + positions[place])
            if self.defect == "states":
                self.state_cache.kv_cache[0, 0, 0] = 7
        entries = _CONTEXT["metadata"]["a"].slot_mapping.tolist()
        for position, slot in zip(positions.tolist(), entries, strict=True):
            if slot >= 0:
                assert position % RATIO == RATIO - 1
                self._write(slot)

    def _write(self, slot: int) -> None:
        pages, (page, place) = self.entries.view(BLOCKS, -1), divmod(slot, ENTRIES)
        size = self.entries.shape[-1]
        scales = {584: 8, 132: 4}[size]
        data = size - scales
        if self.defect == "rows":
            pages[page, place * size :][:size] = 3
        else:  # 255 is what a byte may well be
            pages[page, place * data :][:data] = 255
            pages[page, ENTRIES * data + place * scales :][:scales] = 5


def engine(size: int = 584, defect: str = "", device: str = "cpu", count: int = 1) -> Any:
    entries = (torch.arange(BLOCKS * ENTRIES * size) % 251).to(torch.uint8).view(BLOCKS, ENTRIES, size)
    model = torch.nn.ModuleList()
    for _ in range(count):
        attention: Any = torch.nn.Module()
        attention.compressor, attention.rotary_emb = Compressor(entries, defect), "rotary"
        model.append(attention)
    layers = {"a": SimpleNamespace(kv_cache=entries), "s": model[0].compressor.state_cache}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers), model=model,
        device=torch.device(device),
    )  # fmt: skip


@pytest.mark.parametrize(("size", "scales"), [(584, 8), (132, 4)])
def test_an_entry_is_its_elements_and_its_scales(size: int, scales: int) -> None:
    runner = engine(size)
    layers, data = runner.compilation_config.static_forward_context, size - scales
    entries, states = layers["a"].kv_cache, layers["s"].kv_cache
    before = entries.clone(), states.clone()
    sources = entry_sources(runner, "a", ENTRIES, 7)
    assert {source.layer for source in sources} == {7}
    assert torch.equal(entries, before[0]), "the cache is not changed by finding out"
    assert torch.equal(states, before[1]), "nor are the states of tokens"
    assert layers["s"].kv_cache is states
    plan, every = plan_fingerprint(sources, RealData.ALL, torch.device("cpu")), torch.arange(BLOCKS * ENTRIES)
    known, pages = hash_slots(plan, every), entries.view(BLOCKS, -1)
    pages[2, ENTRIES * data + 5 * scales + scales - 1] ^= 1
    pages[1, 3 * data] ^= 1
    assert (hash_slots(plan, every) != known).any(1).nonzero().flatten().tolist() == [67, 133]


def test_a_state_is_the_row_of_its_token() -> None:
    runner = engine()
    states = runner.compilation_config.static_forward_context["s"].kv_cache
    before = states.clone()
    sources = packed_sources(runner, "s", STATES, 3)
    assert sources is not None
    assert [source.layer for source in sources] == [3]
    assert torch.equal(states, before)
    assert compressed_by(runner, "s") == RATIO
    plan, every = plan_fingerprint(sources, RealData.ALL, torch.device("cpu")), torch.arange(BLOCKS * STATES)
    known = hash_slots(plan, every)
    states[2, 1, WIDTH - 1] += 1
    assert (hash_slots(plan, every) != known).any(1).nonzero().flatten().tolist() == [5]


def test_what_lies_elsewhere_is_left_out() -> None:
    with pytest.raises(UnsupportedEngine, match="entries of a are written elsewhere than expected"):
        entry_sources(engine(defect="rows"), "a", ENTRIES, 7)
    with pytest.raises(UnsupportedEngine, match="states of s are written elsewhere than expected"):
        state_sources(engine(defect="states"), "s", STATES, 7)


def test_what_cannot_be_confirmed_is_left_out() -> None:
    with pytest.raises(UnsupportedEngine, match="2 compressors write it"):
        entry_sources(engine(count=2), "a", ENTRIES, 7)
    with pytest.raises(UnsupportedEngine, match="not packed blocks of 32 entries"):
        entry_sources(engine(), "a", 32, 7)
    with pytest.raises(UnsupportedEngine, match="not packed blocks of 64 entries"):
        entry_sources(engine(size=100), "a", ENTRIES, 7)
    with pytest.raises(UnsupportedEngine, match="not blocks of 3 tokens"):
        state_sources(engine(), "s", 3, 7)
    with pytest.raises(UnsupportedEngine, match="not tried on a GPU"):
        entry_sources(engine(device="meta"), "a", ENTRIES, 7)
    alone = engine()
    del alone.model[0].rotary_emb
    with pytest.raises(UnsupportedEngine, match="no attention layer has the compressor"):
        entry_sources(alone, "a", ENTRIES, 7)
