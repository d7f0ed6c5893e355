"""Sliding-window layers: exact outputs from slots of their own, whatever is evicted under them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.cache.pool import PoolError
from canary_obs.reference_engine.cache.window_slots import WindowSlots
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.model.llama import random_weights
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import EngineConfig, tiny, with_windows
from tests.reference_engine.plain_llama import plain_logits
from tests.reference_engine.test_engine import Logits, check_against_plain, prompt, recorded
from tests.reference_engine.workloads import account, drain, drive
from tests.sizes import sized

WINDOW = 16


def hybrid(**changes: object) -> EngineConfig:
    return replace(with_windows(tiny()), **changes)  # type: ignore[arg-type]


def continued(engine: Engine, logits: Logits, tokens: np.ndarray, hit: int) -> None:
    """Run a prompt to its end; it must find `hit` tokens in the cache and stay exact."""
    before = engine.statistics.prefix_hit_tokens
    engine.add_request(tokens.astype(np.int32), Sampling(max_tokens=8, stop_at_eos=False))
    finished = drain(engine)
    assert engine.statistics.prefix_hit_tokens - before == hit
    check_against_plain(engine, finished, logits)
    account(engine)


def test_the_window_is_in_the_model_and_in_its_oracle() -> None:
    shape = with_windows(tiny()).shape
    assert shape.windows == (WINDOW, None)
    weights = random_weights(shape, 0)
    tokens = prompt(1, 40).tolist()
    windowed, full = (
        plain_logits(replace(shape, windows=windows), weights, tokens) for windows in (shape.windows, ())
    )
    torch.testing.assert_close(windowed[:WINDOW], full[:WINDOW])
    assert (windowed[WINDOW:] - full[WINDOW:]).abs().amax(dim=1).min() > 1e-3


@pytest.mark.parametrize(("token_budget", "page_size"), [(8, 1), (64, 16), *sized([(8, 16), (64, 1)], [])])
def test_load_is_exact_and_accounted_for(
    page_size: int, token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(hybrid(page_size=page_size, token_budget=token_budget))
    logits = recorded(engine, monkeypatch)
    finished = drive(engine, 250, seed=3, each=lambda: account(engine))
    windows = engine.scheduler.windows
    assert windows is not None
    assert min(windows.evicted, engine.statistics.evictions, engine.statistics.aborts) > 0
    assert engine.statistics.preemptions > 0 or page_size > 1
    assert engine.statistics.prefix_hit_tokens > 0
    check_against_plain(engine, finished[-12:], logits)


def test_a_running_request_gives_up_what_it_no_longer_sees() -> None:
    engine = Engine(hybrid())
    request = engine.add_request(prompt(1, 10), Sampling(max_tokens=60, stop_at_eos=False))
    for _ in range(51):
        engine.step()
    windows = engine.scheduler.windows
    assert windows is not None
    resident = windows.slots.resident(request.slots[: request.computed])
    assert request.computed == 60
    # The step that computed position 59 saw 44 to 59. Prompt tokens stay while there is room.
    assert np.flatnonzero(resident).tolist() == [*range(10), *range(44, 60)]
    pool = engine.runner.pool.window
    assert pool is not None
    mapped = pool.full_to_swa[torch.from_numpy(request.slots[:60])]
    assert torch.equal(mapped >= 0, torch.from_numpy(resident))
    assert torch.equal(pool.table[request.row, :60].long(), mapped)


def test_a_match_is_cut_to_what_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(hybrid())
    logits = recorded(engine, monkeypatch)
    engine.add_request(prompt(1, 30), Sampling(max_tokens=40, stop_at_eos=False))
    first = drain(engine)[0].tokens[:70]
    windows = engine.scheduler.windows
    assert windows is not None
    # Computed: 69. Resident: the prompt, and the last window.
    continued(engine, logits, np.concatenate([first, prompt(2, 4)]), hit=69)
    continued(engine, logits, np.concatenate([first[:60], prompt(3, 4)]), hit=30)
    continued(engine, logits, np.concatenate([first[:25], prompt(4, 4)]), hit=25)


def test_tombstones_in_the_cache_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(hybrid())
    logits = recorded(engine, monkeypatch)
    shared = prompt(1, 40)
    engine.add_request(shared, Sampling(max_tokens=2, stop_at_eos=False))
    drain(engine)
    windows = engine.scheduler.windows
    assert windows is not None
    cached = engine.scheduler.cache.held()
    windows.slots.drop(cached)
    assert engine.scheduler.cache.held().size == cached.size == 41
    continued(engine, logits, np.concatenate([shared, prompt(2, 4)]), hit=0)
    continued(engine, logits, np.concatenate([shared, prompt(3, 4)]), hit=40)


def test_pressure_takes_the_oldest_prefix_first() -> None:
    engine = Engine(hybrid(num_slots=256, swa_slots=96))
    for seed in (1, 2):
        engine.add_request(prompt(seed, 40), Sampling(max_tokens=1))
        drain(engine)
    windows = engine.scheduler.windows
    assert windows is not None
    old, young = (engine.scheduler.cache.match(prompt(seed, 40))[0] for seed in (1, 2))
    engine.scheduler.cache.match(prompt(2, 40))
    engine.add_request(prompt(3, 40), Sampling(max_tokens=1))
    drain(engine)
    assert not windows.slots.resident(old).any()
    assert windows.slots.resident(young).all()
    assert engine.scheduler.cache.held().size == 120


def test_rubbish_in_other_slots_stays_there() -> None:
    def outputs(poison: bool) -> list[list[int]]:
        engine = Engine(hybrid())
        pool = engine.runner.pool
        assert pool.window is not None
        if poison:
            pool.kv.fill_(float("nan"))
            pool.window.kv.fill_(float("nan"))
            pool.req_to_token.fill_(engine.config.num_slots - 1)
            pool.window.table.fill_(engine.config.swa_slots - 1)
        for seed, length in enumerate((5, 30, 50)):
            engine.add_request(prompt(seed, length), Sampling(max_tokens=24, stop_at_eos=False))
        return [request.output.tolist() for request in drain(engine)]

    assert outputs(poison=True) == outputs(poison=False)


def test_the_largest_request_fits_the_smallest_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(hybrid(num_slots=144, swa_slots=48, page_size=16))
    logits = recorded(engine, monkeypatch)
    for seed in range(3):
        engine.add_request(prompt(seed, 100), Sampling(max_tokens=28, stop_at_eos=False))
    finished = drain(engine)
    assert len(finished) == 3
    check_against_plain(engine, finished, logits)
    account(engine)


def test_slots_in_a_window_are_not_dropped() -> None:
    slots = WindowSlots(4, 8, 8)
    slots.give(np.arange(4))
    slots.locks[2] = 1
    with pytest.raises(PoolError, match=r"full slots \[2\]"):
        slots.drop(np.arange(4))
    slots.locks[2] = 0
    assert slots.drop(np.arange(6)) == 4
    assert slots.free_slots == 8


@pytest.mark.parametrize(
    ("resident", "page_size", "length"),
    [("", 1, 0), ("1111", 1, 4), ("0000", 1, 0), ("1110111", 1, 7), ("1110110", 1, 3), ("1110111", 2, 2),
     ("0111", 1, 4), ("0110", 1, 0), ("1011", 1, 1)],
)  # fmt: skip
def test_resumable_lengths(resident: str, page_size: int, length: int) -> None:
    slots = WindowSlots(4, 8, 8)
    slots.give(np.flatnonzero([mark == "1" for mark in resident]))
    assert slots.resumable(np.arange(len(resident)), page_size) == length


@pytest.mark.parametrize(
    ("windows", "swa_slots"),
    [((16, None), 47), ((16,), 128), ((16, 16), 128), ((16, 8), 128), ((1, None), 128), ((), 128)],
)
def test_impossible_windows_are_refused(windows: tuple[int | None, ...], swa_slots: int) -> None:
    config = tiny()
    config = replace(config, shape=replace(config.shape, windows=windows), swa_slots=swa_slots)
    with pytest.raises(ConfigurationError) as error:
        Engine(config)
    assert error.value.setting == "windows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 16])
def test_cuda_equals_plain_attention(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(hybrid(page_size=page_size, device="cuda"))
    logits = recorded(engine, monkeypatch)
    finished = drive(engine, 120, seed=3, each=lambda: account(engine))
    moved = {key: value.cpu() for key, value in logits.items()}
    check_against_plain(engine, finished[:20], moved)
