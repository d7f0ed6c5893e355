"""Speculation: draft models are groups of their own, and the records of accepted tokens move along."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real import drafting
from tests.engines.sglang.real.models import make_draft
from tests.engines.sglang.real.perturbed import check_injections, inject_into
from tests.engines.sglang.real.planted import flip_bit, row
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_TOKENS = 20
_STEPS = {"speculative_num_steps": 3}
_CHAIN = _STEPS | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
_TREE = _STEPS | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
_NGRAM = {
    "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6,
    "speculative_ngram_capacity": 100_000,  # the default keeps 1.7 GB for as long as the process lives
}  # fmt: skip
# Three drafted tokens at first; after each batch as many as were accepted suggest, none and one among them.
_ADAPTED = {"1": {"candidate_steps": [0, 1, 3]}, "warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
_KINDS: dict[str, dict[str, Any]] = {
    "adaptive eagle": {
        "speculative_algorithm": "EAGLE",
        "speculative_adaptive": True,
        "page_size": 16,
        **_CHAIN,
    },
    "eagle tree": {"speculative_algorithm": "EAGLE", **_TREE},
    "eagle3": {"speculative_algorithm": "EAGLE3", **_CHAIN},
    "standalone tree": {"speculative_algorithm": "STANDALONE", **_TREE},
    "n-grams": _NGRAM,
}


@pytest.fixture(scope="module")
def plain() -> dict[int, dict[str, list[int]]]:
    """Answers without speculation and canary, by the seed of their prompts."""
    return {}


@pytest.fixture
def make_drafting(
    make_rig: Callable[..., Rig], models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Rig]:
    """A scheduler that drafts, by the name of its kind."""
    drafting.install()

    def make(kind: str) -> Rig:
        settings = dict(_KINDS[kind])
        algorithm = settings["speculative_algorithm"]
        if algorithm != "NGRAM":
            root = models("llama").parent
            draft = root / "llama" if algorithm == "STANDALONE" else make_draft(root, algorithm.lower())
            settings["speculative_draft_model_path"] = str(draft)
        if settings.get("speculative_adaptive"):
            chosen = tmp_path_factory.mktemp("adaptive") / "steps.json"
            chosen.write_text(json.dumps(_ADAPTED), "utf-8")
            settings["speculative_adaptive_config"] = str(chosen)
        return make_rig(**settings)

    return make


@pytest.mark.parametrize("kind", _KINDS)
def test_drafts_of_a_sound_engine(
    make_drafting: Any, make_rig: Any, kind: str, plain: dict[int, Any], monkeypatch: pytest.MonkeyPatch
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
    for group in groups:
        counters = rig.counters(group)
        for phase in (Phase.HEAD, Phase.TAIL, Phase.SWEEP):
            assert counters.verified[phase], (group, phase)
        assert counters.hashed[Phase.SWEEP]
        assert not any(counters.unverified.values())
    if kind in ("standalone tree", "n-grams"):
        assert rig.counters().hashed[Phase.HIT], "no accepted token was moved"
    if not plain:
        monkeypatch.setenv("KV_CANARY_MODE", "none")
        without = make_rig()
        plain |= {seed: without.generate(_asked(seed), _TOKENS) for seed in (0, 1)}
    assert answers == plain


@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_draft_models_kv_flips(make_drafting: Any, part: Part) -> None:
    rig, slots = make_drafting("eagle3"), []

    def flip(rig: Rig) -> None:
        slots.append(int(row(rig)[11]))
        flip_bit(rig.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool, part, 0, slots[0])

    _serve(rig, flip)
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


def _serve(rig: Rig, plant: Callable[[Rig], object]) -> None:
    """Let requests decode, and plant a fault between two turns of the loop."""

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request(name, prompt, 60) for name, prompt in prompts(3).items()]
        while len(rig.running(3, 6)) < 3:
            yield ()
        plant(rig)
        yield from [()] * 2

    rig.run(script())
