"""Caches whose entries are not one token's: left out by name, without the layers beside them."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm import groups
from canary_obs.engines.vllm.compressed import check_an_entry_is_a_token, checked_alike
from canary_obs.errors import UnsupportedEngine

PLAIN, STATE = SimpleNamespace(tokens_per_state=1), SimpleNamespace(tokens_per_state=-1)
COMPRESSED, POOLED = SimpleNamespace(tokens_per_state=128), SimpleNamespace(tokens_per_state=Fraction(1, 4))
EARLIER = SimpleNamespace(compress_ratio=4)  # as earlier versions name it


@pytest.mark.parametrize(
    ("spec", "said"), [(COMPRESSED, "per 128 tokens"), (POOLED, "per 1/4"), (EARLIER, "per 4")]
)
def test_slots_that_are_not_tokens_are_not_taken_for_them(spec: Any, said: str) -> None:
    check_an_entry_is_a_token([PLAIN, SimpleNamespace()])
    with pytest.raises(UnsupportedEngine, match=said):
        check_an_entry_is_a_token([PLAIN, spec])


def test_layers_of_one_group_are_told_apart() -> None:
    specs = {
        "a": PLAIN,
        "b": COMPRESSED,
        "c": PLAIN,
        "key": PLAIN,
        "d": EARLIER,
        "compressed key": COMPRESSED,
    }
    found = checked_alike([*specs], {"key", "compressed key"}, specs.__getitem__)
    assert found == [["a", "c"], ["key"], ["b", "d", "compressed key"]]
    assert checked_alike(["state"], (), lambda _: STATE) == [["state"]]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_compressed_cache_of_vllm_is_no_plain_latent_one() -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    fields: dict[str, Any] = {"block_size": 256, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    assert groups._attention([MLAAttentionSpec(**fields)]) == ("full", None)
    with pytest.raises(UnsupportedEngine, match="per 4 tokens"):
        groups._attention([MLAAttentionSpec(**fields, tokens_per_state=4)])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_windows_of_deepseek_v4_have_an_entry_per_token() -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    spec = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128,
        state_content_bytes=584, alignment=576, model_version="deepseek_v4",
    )  # fmt: skip
    assert groups._attention([spec]) == ("swa", 128)
