"""Speculation changes the number of forwards and nothing else."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.oracle import TokenOracle
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import TINY_SHAPE, demo, tiny, with_model
from canary_obs.reference_engine.tokenizer import EOS
from tests.reference_engine.disaggregated import prompts, samplings
from tests.reference_engine.workloads import account, drain, drive
from tests.sizes import sized


@cache
def outputs(max_tokens: int = 40, **changes: object) -> tuple[Engine, dict[str, list[int]]]:
    """Answers to twelve prompts. In double precision: batches of other shapes then round alike."""
    engine = Engine(tiny(dtype=torch.float64, max_running=4, **changes))
    for prompt, sampling in zip(prompts(12), samplings(12, max_tokens), strict=True):
        engine.add_request(prompt, sampling)
    finished = drain(engine)
    account(engine)
    return engine, {request.id: request.tokens[: request.length].tolist() for request in finished}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft_tokens", sized([1, 2, 5], [1, 5]))
def test_outputs_are_those_without_speculation(page_size: int, draft_tokens: int) -> None:
    plain, expected = outputs(page_size=page_size)
    engine, found = outputs(page_size=page_size, draft_layers=1, draft_tokens=draft_tokens)
    assert found == expected
    statistics = engine.statistics
    assert 0 < statistics.drafts_accepted < statistics.drafts
    assert statistics.steps < plain.statistics.steps


def test_outputs_are_the_same_under_preemption() -> None:
    _, expected = outputs(max_tokens=90)
    engine, found = outputs(max_tokens=90, draft_layers=1, num_slots=144)
    assert engine.statistics.preemptions > 0
    assert found == expected


def test_a_small_budget_checks_fewer_proposals() -> None:
    _, expected = outputs(page_size=1)
    _, found = outputs(draft_layers=1, draft_tokens=7, token_budget=5)
    assert found == expected


def test_load_is_accounted_for() -> None:
    engine = Engine(tiny(draft_layers=1))
    drive(engine, 200, seed=3, each=lambda: account(engine))
    statistics = engine.statistics
    assert min(statistics.preemptions, statistics.evictions, statistics.aborts) > 0
    assert statistics.prefix_hit_tokens > 0
    assert statistics.drafts_accepted > 0


def test_end_of_sequence_among_accepted_proposals() -> None:
    engine = Engine(tiny(draft_layers=1))
    request = engine.add_request(prompts(1)[0], Sampling(max_tokens=9))
    engine.step()
    assert engine.drafter is not None
    request.tokens[request.length] = EOS
    batch = engine.runner.prepare(engine.scheduler.schedule())
    logits = torch.zeros((sum(batch.scores), TINY_SHAPE.vocab_size))
    logits[:, EOS] = 1.0
    assert engine.drafter.accept(batch, logits) == [[EOS]]


def test_mock_traffic_gets_its_oracles_tokens() -> None:
    engine = Engine(tiny(draft_layers=1))
    oracle = TokenOracle(seed=5)
    engine.add_request(oracle.tokens(0, 20), Sampling(max_tokens=20, stop_at_eos=False, oracle=oracle))
    assert drain(engine)[0].output.tolist() == oracle.tokens(20, 40).tolist()
    assert engine.statistics.drafts > 0


def test_a_failed_draft_forward_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(fails_at: int | None) -> list[int]:
        engine = Engine(tiny(dtype=torch.float64, draft_layers=1))
        engine.add_request(prompts(1)[0], Sampling(max_tokens=12, stop_at_eos=False))
        assert engine.drafter is not None
        forward = engine.drafter.runner.forward
        calls = 0

        def failing(batch: ForwardBatch) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise RuntimeError("device lost")
            return forward(batch)

        monkeypatch.setattr(engine.drafter.runner, "forward", failing)
        finished = []
        while engine.has_work():
            try:
                finished += engine.step()
            except RuntimeError:
                account(engine)
        assert (fails_at is None) or calls >= fails_at
        return finished[0].output.tolist()

    expected = served(None)
    assert [served(call) for call in (1, 2, 3, 5)] == [expected] * 4


def test_the_prefix_cache_tells_continuations_apart() -> None:
    """The draft KV of a prefix's last position depends on the token after it."""
    engine = Engine(tiny(dtype=torch.float64, draft_layers=1))
    shared = np.arange(30, dtype=np.int32)
    for token in (100, 101):
        engine.add_request(np.append(shared, np.int32(token)), Sampling(max_tokens=4, stop_at_eos=False))
        drain(engine)
    assert engine.statistics.prefix_hit_tokens == 29


def test_the_model_is_on_offer() -> None:
    assert with_model(demo(), "speculative").draft_layers == 3
    assert with_model(tiny(), "speculative").draft_layers == 1


@pytest.mark.parametrize(
    "changes",
    [{"draft_layers": 2}, {"draft_layers": 1, "draft_tokens": 0}, {"draft_layers": 1, "host_pages": 8}],
)
def test_impossible_drafts_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="draft_layers"):
        Engine(tiny(**changes))
