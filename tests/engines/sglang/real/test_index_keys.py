"""Models whose sparse attention keeps keys of its own (DeepSeek-V3.2): the latent vectors, and the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.sglang.real.index_keys import PAGE, SIZE, add_index_keys
from tests.engines.sglang.real.traffic import prompts, storm

_SMALL: dict[str, Any] = {"max_total_tokens": 1280, "page_size": PAGE, "enable_mixed_chunk": True}


@pytest.fixture(autouse=True)
def _index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    add_index_keys(monkeypatch.setattr)


def test_a_storm_over_latent_vectors_and_index_keys(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("latent", **_SMALL, disable_overlap_schedule=False)
    rig.run(storm(rig, rounds=1))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert [group.name for group in rig.adapter.groups] == ["full", "indexer"]
    for phase in (Phase.HEAD, Phase.TAIL):
        assert rig.counters("indexer").verified[phase] > 10_000
    assert rig.counters("indexer").verified[Phase.SWEEP]
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig("latent", **_SMALL, disable_overlap_schedule=False)
    plain.run(storm(plain, rounds=1))
    assert plain.answers == rig.answers


def test_a_flip_in_an_index_key_or_its_scale_is_found(make_rig: Any) -> None:
    rig = make_rig("latent", **_SMALL)
    rig.generate(prompts(2), 4)
    slot = int(rig.adapter.prefix_cache.cached("full", unlocked_only=True).slots[3])
    page, place = divmod(slot, PAGE)
    keys = rig.runner.token_to_kv_pool.index_k_with_scale_buffer[2]
    for byte in (place * SIZE + 7, PAGE * SIZE + place * 4 + 2):  # a key, a scale
        with torch.inference_mode():
            keys[page, byte] ^= 1 << 3
            rig.settle()
            keys[page, byte] ^= 1 << 3
        found = {(each.group, each.slot, each.reason) for each in rig.found}
        assert found == {("indexer", slot, Reason.KV_DATA)}
        rig.found.clear()
