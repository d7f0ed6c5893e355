"""Speculation: draft models are groups of their own, and the records of accepted tokens move along."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real.draft_kinds import KINDS, model_of_kind
from tests.engines.sglang.real.perturbed import check_injections, inject_into
from tests.engines.sglang.real.planted import flip_bit, row, serve
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_TOKENS = 20


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[int, dict[str, list[int]]]]:
    """Answers without speculation and canary, by model and the seed of their prompts."""
    return {}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_a_sound_engine(
    make_drafting: Any, make_rig: Any, kind: str, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, lengths = make_drafting(kind), set[int]()
    if kind == "adaptive eagle":
        worker = rig.scheduler.draft_worker
        apply = worker.apply_runtime_state
        worker.apply_runtime_state = lambda state: lengths.add(state.speculative_num_steps) or apply(state)
    answers = {seed: rig.generate(_asked(seed), _TOKENS) for seed in (0, 1)}
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert kind != "adaptive eagle" or {0, 1} <= lengths
    groups = [group.name for group in rig.adapter.groups]
    assert groups == (["full"] if kind == "n-grams" else ["full", "draft"])
    rig.assert_checked(groups)
    if kind in ("standalone tree", "n-grams"):
        assert rig.counters().hashed[Phase.HIT], "no accepted token was moved"
    model = model_of_kind(kind)
    if model not in plain:
        monkeypatch.setenv("KV_CANARY_MODE", "none")
        without = make_rig(model)
        plain[model] = {seed: without.generate(_asked(seed), _TOKENS) for seed in (0, 1)}
    assert answers == plain[model]


@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_draft_models_kv_flips(make_drafting: Any, part: Part) -> None:
    rig, slots = make_drafting("eagle3"), []

    def flip(rig: Rig) -> None:
        slots.append(int(row(rig)[11]))
        flip_bit(rig.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool, part, 0, slots[0])

    serve(rig, flip, turns=2)
    (found,) = {(item.reason, item.group, item.part, item.slot) for item in rig.settle()}
    assert found == (Reason.KV_DATA, "draft", part, slots[0])


def test_every_injection_into_drafts_is_accounted_for(
    make_drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is shown the tokens that were verified, several of each request."""
    inject_into("draft", monkeypatch)
    why = "fewer than two requests add one token each"
    check_injections(make_drafting("eagle3"), "draft", why, longest=160)


def test_a_move_copies_another_slot(make_drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says what it moves, and what arrives is something else."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    wrong, move = list[int](), MHATokenToKVPool.move_kv_cache

    def moved(self: Any, tgt_loc: Any, src_loc: Any) -> None:
        (real,) = ((tgt_loc != src_loc) & (tgt_loc > 0)).nonzero(as_tuple=True)
        if not wrong and real.numel():
            wrong.append(int(tgt_loc[real[0]]))
            src_loc = src_loc.clone()
            src_loc[real[0]] = 1
        move(self, tgt_loc, src_loc)

    monkeypatch.setattr(MHATokenToKVPool, "move_kv_cache", moved)
    rig = make_drafting("n-grams")
    rig.generate(_asked(0), _TOKENS)
    assert (Reason.KV_DATA, wrong[0]) in {(item.reason, item.slot) for item in rig.settle()}


@pytest.mark.parametrize("fault", ["another node is moved", "nothing is moved"])
def test_a_wrong_path_is_accepted(make_drafting: Any, fault: str) -> None:
    """What lies in the slots is sound KV, of other tokens than the request's."""
    rig, wrong = make_drafting("n-grams"), []
    pool = rig.runner.token_to_kv_pool
    announced = pool.move_kv_cache

    def moved(tgt_loc: Any, src_loc: Any) -> None:
        (real,) = ((tgt_loc != src_loc) & (tgt_loc > 0)).nonzero(as_tuple=True)
        if not wrong and real.numel():
            wrong.append(int(tgt_loc[real[0]]))
            if fault == "nothing is moved":
                return
            src_loc = src_loc.clone()
            src_loc[real[0]] = tgt_loc[real[0] - 1]
        announced(tgt_loc, src_loc)

    pool.move_kv_cache = moved
    rig.generate(_asked(0), _TOKENS)
    pool.move_kv_cache = announced
    assert wrong
    assert {item.reason for item in rig.settle()} & {Reason.CHAIN, Reason.TOKEN, Reason.WRITE_POSITION}


def _asked(seed: int) -> dict[str, list[int]]:
    return prompts(5, seed, longest=160)
