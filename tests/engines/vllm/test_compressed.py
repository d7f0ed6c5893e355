"""Caches whose entries are not one token's: left out by name, without the layers beside them."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm import groups
from canary_obs.engines.vllm.compressed import (
    LayerKind,
    check_an_entry_is_a_token,
    checked_alike,
    entry_tokens,
)
from canary_obs.errors import UnsupportedEngine

PLAIN, STATE = SimpleNamespace(tokens_per_state=1), SimpleNamespace(tokens_per_state=-1)
COMPRESSED, POOLED = SimpleNamespace(tokens_per_state=128), SimpleNamespace(tokens_per_state=Fraction(1, 4))
EARLIER = SimpleNamespace(compress_ratio=4)  # as earlier versions name it


@pytest.mark.parametrize(
    ("spec", "said"), [(COMPRESSED, "per 128 tokens"), (POOLED, "per 1/4"), (EARLIER, "per 4")]
)
def test_slots_that_are_not_tokens_are_not_taken_for_them(spec: Any, said: str) -> None:
    check_an_entry_is_a_token([PLAIN, STATE, SimpleNamespace()])
    with pytest.raises(UnsupportedEngine, match=said):
        check_an_entry_is_a_token([PLAIN, spec])


def test_layers_of_one_group_are_told_apart() -> None:
    kinds = {
        "entries": LayerKind(128),
        "key": LayerKind(0, indexer=True),
        "a": LayerKind(0),
        "state": LayerKind(0, compressing=True),
        "compressed key": LayerKind(4, indexer=True),
        "b": LayerKind(0),
        "more entries": LayerKind(128),
    }
    found = checked_alike(kinds, kinds.__getitem__)
    assert found == [["a", "b"], ["key"], ["state"], ["compressed key"], ["entries", "more entries"]]


def runner(**more: Any) -> Any:
    plain = {"device": SimpleNamespace(type="cpu"), "use_async_scheduling": False, "speculative_config": None}
    return SimpleNamespace(**plain | {"vllm_config": SimpleNamespace(kv_transfer_config=None)} | more)


def test_runs_whose_tokens_the_host_has_are_followed() -> None:
    assert entry_tokens(runner(), [COMPRESSED, COMPRESSED], 256, 256) == 128
    assert entry_tokens(runner(), [EARLIER], 256, 256) == 4
    assert entry_tokens(runner(device=SimpleNamespace(type="cuda")), [PLAIN], 256, 64) == 1


@pytest.mark.parametrize(
    ("given", "spec", "table", "said"),
    [
        ({"block_tables": None}, COMPRESSED, 256, "with the V2 model runner"),
        ({"device": SimpleNamespace(type="cuda")}, COMPRESSED, 256, "with a GPU"),
        ({"use_async_scheduling": True}, COMPRESSED, 256, "with asynchronous scheduling"),
        ({"speculative_config": object()}, COMPRESSED, 256, "with speculative decoding"),
        (
            {"vllm_config": SimpleNamespace(kv_transfer_config=object())}, COMPRESSED, 256,
            "with a KV connector",
        ),
        ({}, COMPRESSED, 64, "with a block table of other blocks"),
        ({}, POOLED, 256, "with blocks that it does not divide"),
        ({}, SimpleNamespace(tokens_per_state=96), 256, "with blocks that it does not divide"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_followed_are_left_out(
    given: dict[str, Any], spec: Any, table: int, said: str
) -> None:
    with pytest.raises(UnsupportedEngine, match=said):
        entry_tokens(runner(**given), [spec], 256, table)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_windows_of_deepseek_v4_have_an_entry_per_token() -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    spec = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128,
        state_content_bytes=584, alignment=576, model_version="deepseek_v4",
    )  # fmt: skip
    assert groups._attention([spec]) == ("swa", 128)
