"""The engine computes what a plain full-attention forward computes, whatever it does with its cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.model.llama import random_weights
from canary_obs.reference_engine.scheduling.request import Request, Sampling, Status
from canary_obs.reference_engine.settings import EngineConfig, tiny
from canary_obs.reference_engine.tokenizer import EOS
from tests.reference_engine.plain_llama import plain_logits
from tests.reference_engine.workloads import account, drain, drive

Logits = dict[tuple[int, int], torch.Tensor]  # (request serial, tokens so far) -> logits


def prompt(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Logits of every forward of an engine, as they come."""
    logits: Logits = {}
    forward = engine.runner.forward

    def recording(batch: ForwardBatch) -> torch.Tensor:
        result = forward(batch)
        for request, prefix, extend, row in zip(
            batch.requests, batch.prefixes, batch.extends, result, strict=True
        ):
            logits[request.serial, prefix + extend] = row.clone()
        return result

    monkeypatch.setattr(engine.runner, "forward", recording)
    return logits


def check_against_plain(engine: Engine, requests: list[Request], logits: Logits) -> None:
    config = engine.config
    drawn = random_weights(config.shape, config.seed, config.dtype, torch.device(config.device))
    weights = {name: weight.cpu() for name, weight in drawn.items()}
    for request in requests:
        tokens = request.tokens[: request.length].tolist()
        plain = plain_logits(config.shape, weights, tokens)
        for position in range(request.prompt_length - 1, request.length - 1):
            mine = logits[request.serial, position + 1].double()
            torch.testing.assert_close(mine, plain[position], atol=2e-4, rtol=2e-4)
            best = plain[position].topk(2).values
            if request.sampling.temperature == 0 and best[0] - best[1] > 1e-3:
                assert tokens[position + 1] == int(plain[position].argmax())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("token_budget", [8, 64])
def test_outputs_equal_plain_attention(
    page_size: int, token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny(page_size=page_size, token_budget=token_budget))
    logits = recorded(engine, monkeypatch)
    for seed, length in enumerate((1, 2, 17, 40, 64)):
        engine.add_request(prompt(seed, length), Sampling(max_tokens=12, stop_at_eos=False))
    finished = drain(engine)
    assert [len(request.output) for request in finished] == [12] * 5
    check_against_plain(engine, finished, logits)
    account(engine)


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefix_hits_change_nothing(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(page_size=page_size))
    logits = recorded(engine, monkeypatch)
    shared = prompt(1, 48)
    engine.add_request(shared, Sampling(max_tokens=8, stop_at_eos=False))
    finished = drain(engine)
    longer = np.concatenate([finished[0].tokens[: finished[0].length], prompt(2, 9)])
    branch = np.concatenate([shared[:37], prompt(3, 20)])
    for tokens in (longer, branch, shared):
        engine.add_request(tokens, Sampling(max_tokens=8, stop_at_eos=False))
    finished += drain(engine)
    expected = {1: 55 + 37 + 47, 16: 48 + 32 + 32}[page_size]
    assert engine.statistics.prefix_hit_tokens == expected
    check_against_plain(engine, finished, logits)
    assert np.array_equal(finished[0].output, next(r for r in finished if r.serial == 3).output)
    account(engine)


@pytest.mark.parametrize("page_size", [1, 16])
def test_preemption_changes_nothing(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(page_size=page_size, num_slots=144))
    logits = recorded(engine, monkeypatch)
    for seed in range(6):
        engine.add_request(prompt(seed, 20), Sampling(max_tokens=60, stop_at_eos=False))
    finished = drain(engine)
    assert engine.statistics.preemptions > 0
    assert engine.statistics.evictions > 0
    assert {request.serial for request in finished} == set(range(6))
    check_against_plain(engine, finished, logits)
    account(engine)


def test_load_is_exact_and_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny())
    logits = recorded(engine, monkeypatch)
    finished = drive(engine, 300, seed=3, each=lambda: account(engine))
    statistics = engine.statistics
    assert min(statistics.preemptions, statistics.evictions, statistics.aborts) > 0
    assert statistics.prefix_hit_tokens > 0
    check_against_plain(engine, finished[-15:], logits)


@pytest.mark.parametrize("page_size", [1, 16])
def test_same_seed_same_outputs(page_size: int) -> None:
    def run() -> list[tuple[str, bytes]]:
        engine = Engine(tiny(page_size=page_size))
        return [(r.id, r.tokens[: r.length].tobytes()) for r in drive(engine, 250, seed=5)]

    first = run()
    assert len(first) > 20
    assert run() == first


def test_seeds_differ() -> None:
    outputs = set()
    for seed in range(4):
        engine = Engine(tiny())
        engine.add_request(prompt(1, 10), Sampling(max_tokens=16, temperature=1.0, seed=seed))
        outputs.add(drain(engine)[0].output.tobytes())
    assert len(outputs) == 4


def test_sampling_follows_the_softmax() -> None:
    engine = Engine(tiny())
    request = engine.add_request(prompt(1, 4), Sampling(max_tokens=1, temperature=0.7, seed=1))
    plan = engine.scheduler.schedule()
    batch = engine.runner.prepare(plan)
    logits = torch.full((1, 258), -50.0)
    logits[0, :3] = torch.tensor([0.0, 0.7, 1.4])
    counts = np.zeros(3)
    for _ in range(3000):
        token = engine.runner.sample(batch, logits)[0]
        assert token is not None
        counts[token] += 1
    wanted = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    # 3000 draws: a standard deviation is below 0.01.
    assert np.abs(counts / 3000 - wanted).max() < 0.045
    assert request.status is Status.RUNNING


def test_abort_at_every_moment() -> None:
    for steps in range(8):
        engine = Engine(tiny(token_budget=8, page_size=16))
        keep = engine.add_request(prompt(9, 20), Sampling(max_tokens=3, stop_at_eos=False))
        victim = engine.add_request(prompt(1, 30), Sampling(max_tokens=4, stop_at_eos=False))
        for _ in range(steps):
            engine.step()
        assert engine.abort(victim.id) is (victim.status is Status.ABORTED)
        assert not engine.abort(victim.id)
        account(engine)
        drain(engine)
        assert keep.status is Status.FINISHED
        account(engine)


def test_waiting_request_can_be_aborted() -> None:
    engine = Engine(tiny(max_running=1))
    first = engine.add_request(prompt(1, 10), Sampling(max_tokens=2))
    second = engine.add_request(prompt(2, 10), Sampling(max_tokens=2))
    engine.step()
    assert second.status is Status.WAITING
    assert engine.abort(second.id)
    assert second.status is Status.ABORTED
    drain(engine)
    assert first.status is Status.FINISHED
    assert engine.statistics.aborts == 1


def test_failed_forward_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(tiny())
    plain.add_request(prompt(1, 40), Sampling(max_tokens=6))
    expected = drain(plain)[0].output
    engine = Engine(tiny())
    engine.add_request(prompt(1, 40), Sampling(max_tokens=6))

    def failing(batch: ForwardBatch) -> torch.Tensor:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", failing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="device lost"):
                engine.step()
            account(engine)
    assert np.array_equal(drain(engine)[0].output, expected)


def test_failed_forward_leaves_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(token_budget=8))
    request = engine.add_request(prompt(1, 40), Sampling(max_tokens=6))
    engine.step()

    def failing(batch: ForwardBatch) -> torch.Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.runner, "forward", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert request.allocated == 16
    engine.abort(request.id)
    assert engine.scheduler.cache.held().size == 8
    account(engine)


@pytest.mark.parametrize("stop", [True, False])
def test_end_of_sequence(stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny())
    monkeypatch.setattr(engine.runner, "sample", lambda batch, logits: [EOS] * len(batch.requests))
    engine.add_request(prompt(1, 4), Sampling(max_tokens=5, stop_at_eos=stop))
    assert drain(engine)[0].output.tolist() == [EOS] * (1 if stop else 5)


def test_the_youngest_gives_way_and_returns_first() -> None:
    engine = Engine(tiny(num_slots=144, max_running=8))
    requests = [
        engine.add_request(prompt(seed, 30), Sampling(max_tokens=60, stop_at_eos=False)) for seed in range(8)
    ]
    while engine.statistics.preemptions == 0:
        engine.step()
    running, waiting = engine.scheduler.running, list(engine.scheduler.waiting)
    assert running + waiting == requests


def test_nothing_to_do() -> None:
    engine = Engine(tiny())
    assert not engine.has_work()
    assert engine.step() == ()
    assert engine.idle() is False
    assert engine.statistics.steps == 0


@pytest.mark.parametrize(("length", "max_tokens"), [(0, 4), (4, 0), (120, 9)])
def test_impossible_requests_are_refused(length: int, max_tokens: int) -> None:
    engine = Engine(tiny())
    with pytest.raises(ValueError, match="max_context=128"):
        engine.add_request(prompt(1, length), Sampling(max_tokens=max_tokens))
    assert not engine.has_work()


def test_ids_are_unique() -> None:
    engine = Engine(tiny())
    engine.add_request(prompt(1, 4), Sampling(), request_id="mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add_request(prompt(1, 4), Sampling(), request_id="mine")


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": 250, "page_size": 16}, "num_slots"),
        ({"num_slots": 128}, "num_slots"),
        ({"token_budget": 4}, "token_budget"),
        ({"page_size": -1}, "page_size"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], setting: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Engine(replace(tiny(), **changes))
    assert error.value.setting == setting


def test_largest_request_fits_the_smallest_pool() -> None:
    config: EngineConfig = tiny(num_slots=144, page_size=16)
    engine = Engine(config)
    for seed in range(3):
        engine.add_request(prompt(seed, 100), Sampling(max_tokens=28, stop_at_eos=False))
    assert len(drain(engine)) == 3
    account(engine)


def test_rubbish_in_other_slots_stays_there() -> None:
    engine = Engine(tiny())
    engine.runner.pool.kv.fill_(float("nan"))
    engine.runner.pool.req_to_token.fill_(engine.config.num_slots - 1)
    for seed, length in enumerate((5, 30)):
        engine.add_request(prompt(seed, length), Sampling(max_tokens=8, stop_at_eos=False))
    poisoned = [request.output.tolist() for request in drain(engine)]
    clean = Engine(tiny())
    for seed, length in enumerate((5, 30)):
        clean.add_request(prompt(seed, length), Sampling(max_tokens=8, stop_at_eos=False))
    assert poisoned == [request.output.tolist() for request in drain(clean)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 16])
def test_cuda_equals_plain_attention(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(page_size=page_size, device="cuda"))
    logits = recorded(engine, monkeypatch)
    finished = drive(engine, 120, seed=3, each=lambda: account(engine))
    moved = {key: value.cpu() for key, value in logits.items()}
    assert len(finished) > 5
    check_against_plain(engine, finished[:20], moved)
