"""Most layers of this model keep a state per request: the full ones are protected, and the others told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real.traffic import prompts, storm

_SMALL = {"max_total_tokens": 832, "max_mamba_cache_size": 32}


def test_a_storm_over_full_layers_and_states(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses its overlap loop for these models on a CPU."""
    rig = make_rig("states", **_SMALL)
    rig.run(storm(rig, rounds=1))
    assert rig.settle() == []
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    (told,) = (reason for reason in reasons if "linear attention" in reason)
    assert told.startswith("states of 3 layers of linear attention are not checked (8")
    assert {source.layer for source in rig.adapter.groups[0].sources} == {3}
    for phase in (Phase.HEAD, Phase.TAIL):
        assert rig.counters().verified[phase] > 10_000
    assert rig.counters().verified[Phase.SWEEP]
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig("states", **_SMALL)
    plain.run(storm(plain, rounds=1))
    assert plain.answers == rig.answers


@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_full_layer_flips(make_rig: Any, part: Part) -> None:
    rig = make_rig("states", **_SMALL)
    rig.generate(prompts(2), 4)
    slot = int(rig.adapter.prefix_cache.cached("full", unlocked_only=True).slots[3])
    pool = rig.runner.token_to_kv_pool.full_kv_pool
    with torch.inference_mode():
        (pool.k_buffer if part is Part.K else pool.v_buffer)[0].view(torch.int32)[slot, 0, 0] ^= 1 << 9
    assert {(found.reason, found.slot) for found in rig.settle()} == {(Reason.KV_DATA, slot)}
