"""What of SGLang's KV memory no group shows is named, with its share and the reason. Stand-ins for pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang import groups
from canary_obs.engines.sglang.deepseek_v4 import (
    ENTRIES,
    KEYS,
    POOL,
    STATES,
    UNIFIED,
    WINDOWS,
    entry_sources,
    key_sources,
    left_out,
    window_sources,
)
from canary_obs.engines.sglang.left_out import LeftOut
from canary_obs.errors import UnsupportedEngine

_KiB = 1024


def test_a_part_is_described_with_its_share_of_all_bytes() -> None:
    part = LeftOut(what="keys of 3 indexers", bytes=30, reason="they lie elsewhere")
    assert part.described(400) == "keys of 3 indexers are not checked (7.5% of KV bytes): they lie elsewhere"
    assert "(0.0% of KV bytes)" in part.described(0)


def held(size: int = _KiB) -> Any:
    return SimpleNamespace(kv_buffer=[torch.zeros(size, dtype=torch.uint8)])


def keys(size: int = _KiB, four_bits: bool = False) -> Any:
    pages = [torch.zeros(size, dtype=torch.uint8)]
    return SimpleNamespace(contiguous_page_row_buffers=lambda: pages, use_fp4_indexer=four_bits)


def pool(**changed: Any) -> Any:
    """DeepSeek-V4's, of three layers: their windows, entries, keys, and states of compression."""
    states = SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(256, dtype=torch.uint8)))
    given: dict[str, Any] = {
        "swa_kv_pool": held(), "kv_pools": {4: held(), 128: held()}, "index_pools": {4: keys()},
        "request_window": None, "swa_req_ring_size": None, "unified_kv_pool": None,
        "compression_ratios": [0, 4, 128], "_stage_start": 0, "_stage_end": 3,
        "compress_state_pools": [states, None], "indexer_compress_state_pools": [states],
    }  # fmt: skip
    return type(POOL, (), given | changed)()


@pytest.mark.parametrize(
    ("sources", "changed", "reason"),
    [
        (window_sources, {"request_window": SimpleNamespace(state=held())}, "in a ring of each request"),
        (window_sources, {"swa_req_ring_size": 64}, "in a ring of each request"),
        (lambda given: entry_sources(given, 2), {"kv_pools": {2: held()}}, "layers share them"),
        (lambda given: entry_sources(given, 4), {"kv_pools": {4: None}}, "behind the window's rows"),
        (lambda given: key_sources(given, 2), {"index_pools": {2: keys()}}, "layers share them"),
        (lambda given: key_sources(given, 4), {"index_pools": {4: keys(four_bits=True)}}, "of 4 bits"),
    ],
)
def test_layouts_of_sub_pools_that_are_not_covered_are_named(sources: Any, changed: Any, reason: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"{reason}, which is not covered yet"):
        sources(pool(**changed))


def test_rows_of_another_class_or_layout_are_named() -> None:
    rows = type("AnotherPool", (), vars(held()) | {"kv_layout": SimpleNamespace(value="v5")})()
    with pytest.raises(UnsupportedEngine, match="they lie in AnotherPool with layout 'v5', which is"):
        window_sources(pool(swa_kv_pool=rows))
    own = type("DeepSeekV4SingleKVPool", (), vars(held()) | {"kv_layout": "v5"})()
    with pytest.raises(UnsupportedEngine, match="with layout 'v5', which is not covered yet"):
        entry_sources(pool(kv_pools={4: own}), 4)


def test_each_sub_pool_that_is_refused_is_left_out_with_its_bytes() -> None:
    refused = {WINDOWS: "a", ENTRIES.format(128): "b", KEYS.format(4): "c"}
    assert [(part.what, part.bytes, part.reason) for part in left_out(pool(), refused)] == [
        (WINDOWS, _KiB, "a"), (ENTRIES.format(128), _KiB, "b"), (KEYS.format(4), _KiB, "c"),
        (STATES, 512, "each forward overwrites them, so that nothing stays that could be compared"),
    ]  # fmt: skip


def test_windows_and_entries_in_one_pool_are_left_out_together() -> None:
    given = pool(swa_kv_pool=None, kv_pools={4: None}, index_pools={}, unified_kv_pool=held(3 * _KiB))
    parts = {part.what: part for part in left_out(given, {WINDOWS: "a"})}
    assert set(parts) == {UNIFIED, STATES}, "of what has no bytes of its own nothing is told"
    assert parts[UNIFIED].bytes == 3 * _KiB
    assert parts[UNIFIED].reason == "they lie in one ring and its pages, which is not covered yet"


def compressed(given: Any) -> groups.FoundGroups:
    full = SimpleNamespace(size=2048, page_size=256)
    windows = SimpleNamespace(size=512, page_size=256)
    allocator = SimpleNamespace(
        full_attn_allocator=full, swa_attn_allocator=windows, full_to_swa_index_mapping=torch.zeros(2304)
    )
    return groups.find_groups(
        SimpleNamespace(token_to_kv_pool=given, token_to_kv_pool_allocator=allocator, sliding_window_size=127)
    )


def test_an_engine_whose_sub_pools_are_all_refused_keeps_the_group_of_its_table() -> None:
    """Of another build's pools: their attributes may be others, and fail in any way."""
    found = compressed(pool())
    assert [group.view.name for group in found.covered] == ["full"]
    told = {part.what: part.reason for part in found.left_out}
    assert set(told) == {WINDOWS, ENTRIES.format(4), ENTRIES.format(128), KEYS.format(4), STATES}
    assert told[WINDOWS].startswith("AttributeError: ")


def test_index_keys_that_are_not_covered_are_left_out_beside_their_latent_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = SimpleNamespace(num_slots=64)
    monkeypatch.setattr(groups, "_view", lambda *_: view)
    given = SimpleNamespace(
        start_layer=0, layer_num=3, index_key_cache=object(), index_kpool=4,
        skip_topk_layers=[False, True, False],
        index_k_with_scale_buffer=[torch.zeros(100, dtype=torch.uint8)] * 2,
    )  # fmt: skip
    runner = SimpleNamespace(token_to_kv_pool=given, token_to_kv_pool_allocator=object())
    found = groups.find_groups(runner)
    assert [group.view for group in found.covered] == [view]
    (part,) = found.left_out
    assert (part.what, part.bytes) == ("keys of 2 indexers", 200)
    assert part.reason == "each is of 4 tokens: such pooled keys are not covered yet"
