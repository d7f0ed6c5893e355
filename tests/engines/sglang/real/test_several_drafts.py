"""Several draft models of one scheduler (multi-layer EAGLE): each one's layers are a group of their own."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.vocabulary import Part, Reason, State
from tests.engines.sglang.real import several_drafts
from tests.engines.sglang.real.perturbed import check_injections, inject_into
from tests.engines.sglang.real.planted import flip_bit, serve, window_slot
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_TOKENS = 20
_WINDOWS, _PLAIN = "several drafts", "several drafts without windows"
_PARTS = Part.K, Part.V, Part.K


def test_a_sound_engine_and_a_flip_in_each_models_kv(
    make_drafting: Any, make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, accepted, asked = make_drafting(_WINDOWS), list[int](), prompts(5, longest=160)
    worker = rig.scheduler.draft_worker
    verify = worker.verify

    def counted(*given: Any, **named: Any) -> Any:
        result = verify(*given, **named)
        accepted.extend((result.accept_lens - 1).tolist())
        return result

    worker.verify = counted
    answers = rig.generate(asked, _TOKENS)
    assert {0, 3} <= set(accepted), "drafts of all lengths are to be tested"
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    groups = [group.name for group in rig.adapter.groups]
    assert groups == ["full", "swa", "draft_0", "draft_1", "draft_2"]
    rig.assert_checked(groups)

    slots = list[int]()

    def flip(rig: Rig) -> None:
        slots.append(window_slot(rig))
        for runner, part in zip(worker._draft_model_runners(), _PARTS, strict=True):
            flip_bit(runner.token_to_kv_pool.swa_kv_pool, part, 0, slots[0])

    serve(rig, flip, turns=2)
    assert {(item.reason, item.group, item.part, item.slot) for item in rig.settle()} == {
        (Reason.KV_DATA, f"draft_{number}", part, slots[0]) for number, part in enumerate(_PARTS)
    }
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    assert answers == make_rig(several_drafts.MODEL).generate(asked, _TOKENS)


def test_a_models_kv_is_not_written(make_drafting: Any) -> None:
    """What was drafted before and rejected stays in its slots."""
    rig = make_drafting(_PLAIN)
    rig.generate(prompts(5, seed=1, longest=160), _TOKENS)
    assert rig.settle() == []
    assert [group.name for group in rig.adapter.groups] == ["full", "draft_0", "draft_1"]
    pool = rig.scheduler.draft_worker._draft_model_runners()[1].token_to_kv_pool

    def lose(_: Rig) -> None:
        pool.set_kv_buffer = lambda *_, **__: None

    serve(rig, lose, turns=8)
    del pool.set_kv_buffer
    assert {(item.reason, item.group) for item in rig.settle()} == {(Reason.LOST_WRITE, "draft_1")}


def test_every_injection_is_accounted_for(make_drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_into("draft_1", monkeypatch)
    why = "fewer than two requests add one token each"
    check_injections(make_drafting(_PLAIN), "draft_1", why, longest=160)
