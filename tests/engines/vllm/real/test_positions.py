"""KV that does not depend on the position (ALiBi): equal bytes that should be equal are no lost write."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.vocabulary import Mode, Phase, Reason, State


def repeated(count: int) -> list[list[int]]:
    """Prompts of one token each, of several lengths: in reused blocks it stands at other positions."""
    return [[7 + number % 2] * (40 + 13 * number) for number in range(count)]


def reuse_blocks(rig: Any) -> None:
    """Fill a small pool several times, so that slots hold the same token at another position."""
    for number in range(4):
        rig.generate(repeated(8)[number:] + repeated(8)[:number], 8)
        assert rig.llm.reset_prefix_cache()


def test_repeated_tokens_are_no_lost_writes(make_rig: Any) -> None:
    rig = make_rig("bloom", dtype="bfloat16", num_gpu_blocks_override=24, max_num_seqs=4, max_model_len=512)
    reuse_blocks(rig)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.canary.config.mode is Mode.LOG
    lose_writes(rig)
    assert set(rig.reasons()) == {(Phase.TAIL, Reason.LOST_WRITE)}
    assert rig.canary.counter_reader.violations >= 64


def lose_writes(rig: Any) -> None:
    """Other tokens are computed for slots that were used before, and no layer writes them."""
    layers = rig.runner.compilation_config.static_forward_context.values()
    with pytest.MonkeyPatch.context() as patch:
        for layer in layers:
            patch.setattr(layer.impl, "do_kv_cache_update", lambda *_, **__: None)
        rig.generate([[9] * 64 for _ in range(4)], 1)
    rig.settle()
