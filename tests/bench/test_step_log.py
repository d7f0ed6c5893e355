"""Gaps between tokens and the canary's host time, step by step."""

from __future__ import annotations

import pytest

from canary_obs.bench import step_log
from canary_obs.bench.step_log import StepLog, spent_us, with_pinned


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """Five steps; the third gives no token, and the clock of `scheduler` begins after the first."""
    ends = iter([1.0, 1.010, 1.015, 1.030, 1.040])
    sums = iter([(0.1, None), (0.2, 0.0), (0.2, 0.01), (0.25, 0.01), (0.5, 0.03)])
    clocks: dict[str, float] = {}
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: next(ends))
    noted = StepLog(lambda: clocks)
    for given in (2, 2, 0, 1, 2):
        head, scheduler = next(sums)
        clocks["head"] = head
        if scheduler is not None:
            clocks["scheduler"] = scheduler
        noted.note([object()] * given)
    return noted


def test_a_reader_waits_from_one_token_to_the_next_through_steps_without(log: StepLog) -> None:
    assert log.token_gaps_ms() == pytest.approx([10.0, 20.0, 10.0])
    assert log.seconds() == pytest.approx(0.040)


def test_each_step_is_what_its_sums_added(log: StepLog) -> None:
    assert log.host_us() == {
        "head": [100_000.0, 0.0, 50_000.0, 250_000.0],
        "scheduler": [0.0, 10_000.0, 0.0, 20_000.0],
        "all": [100_000.0, 10_000.0, 50_000.0, 270_000.0],
    }


def test_without_a_canary_there_is_no_host_time() -> None:
    assert spent_us([{}, {}, {}]) == {}


def test_allocations_of_pinned_memory_are_those_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_host_alloc": 7, "host_alloc_time.total": 100, "active_bytes.current": 5}
    monkeypatch.setattr(step_log.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(step_log.torch.cuda, "host_memory_stats", lambda: dict(stats))

    def load() -> dict[str, float]:
        stats["num_host_alloc"] += 2
        stats["host_alloc_time.total"] += 30
        return {"seconds": 1.0}

    assert with_pinned(load) == {"seconds": 1.0, "pinned": {"allocations": 2, "us": 30}}
    monkeypatch.setattr(step_log.torch.cuda, "is_available", lambda: False)
    assert with_pinned(load) == {"seconds": 1.0}
