"""On which core an engine of a bench runs a load."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from canary_obs.bench import shared_core
from canary_obs.bench.shared_core import take_core

CORES = sorted(os.sched_getaffinity(0))


def cores_of_rounds(rounds: range) -> list[set[int]]:
    def cores_of(number: int) -> set[int]:
        take_core(number)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        return list(thread.map(cores_of, rounds))


def test_a_round_has_one_core_of_those_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert CORES == shared_core._CORES
    rounds = range(len(CORES) + 1)
    assert cores_of_rounds(rounds) == [*({core} for core in CORES), {CORES[0]}], (
        "the choice before is no limit"
    )
    assert sorted(os.sched_getaffinity(0)) == CORES, "that of the calling thread alone"


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
@pytest.mark.parametrize(("visible", "place"), [("0", 0), ("", 0), ("GPU-8ac1", 0), ("1", 1), ("1,0", 1)])
def test_benches_of_two_gpus_share_no_core(visible: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cores_of_rounds(range(1)) == [{CORES[place * len(CORES) // 2]}]


def test_on_a_cpu_an_engine_computes_on_all_cores() -> None:
    assert cores_of_rounds(range(2)) == [set(CORES)] * 2
