"""Which rounds and loads `bench vllm-load` runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.bench import vllm_load_engine
from canary_obs.bench.vllm_load import LOADS, VllmLoadPlan, rounds_in_time, run_vllm_load
from canary_obs.bench.vllm_load_engine import check_protected
from canary_obs.bench.vllm_workloads import LoadPlan
from canary_obs.errors import ConfigurationError, UnsupportedEngine

PLAN = VllmLoadPlan(
    shape="tiny", runner="v1", names=LOADS, batches=(1, 4), rounds=2, seconds=None, memory=0.1, control=False,
    seed=1,
    load=LoadPlan(requests=4, context=64, steps=8, prefill=256, prefills=1, mixed=4, short=4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "age", "numbers"),
    [
        (None, 1e6, [0, 1, 2, 3]),
        (1e6, 0.0, [0, 1, 2, 3]),
        (1.0, 0.0, [0, 1]),  # whatever was asked for, one round counts
        (280.0, 270.0, [0, 1]),  # the end takes longer than what is left
    ],
)
def test_rounds_end_in_time(seconds: float | None, age: float, numbers: list[int]) -> None:
    assert list(rounds_in_time(3, seconds, time.monotonic() - age)) == numbers


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ("decode", "prefil")}, "--loads='prefil': known are decode, single"),
        ({"batches": (1, 512)}, "--prefill=256: a step of 512 requests has a token of each"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_engines_start(change: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        run_vllm_load(replace(PLAN, **change), on_progress=lambda _: pytest.fail("it ran"))


def test_an_engine_that_was_to_have_a_canary_and_has_none_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KV_CANARY_MODE", "log")
    check_protected(object())
    with pytest.raises(UnsupportedEngine, match=r"has no canary.*pip install"):
        check_protected(None)
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    check_protected(None)


@pytest.mark.parametrize("protected", [True, False])
def test_a_canary_does_nothing_while_its_engine_waits_for_a_load(
    monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    """And each load begins at the speed of an engine that is alone on its GPU, on the core of its round."""
    happened: list[str] = []

    @contextmanager
    def paused() -> Iterator[None]:
        happened.append("paused")
        yield
        happened.append("goes on")

    def lines() -> Iterator[str]:
        for line in ('["decode", 5]', '["single", 6]'):
            happened.append("waits")
            yield line

    monkeypatch.setattr(vllm_load_engine, "runtime_of", lambda _: object() if protected else None)
    monkeypatch.setattr(vllm_load_engine, "attached_adapter", lambda _: SimpleNamespace(paused=paused))
    monkeypatch.setattr(vllm_load_engine, "launch_as_alone", lambda: happened.append("as alone"))
    monkeypatch.setattr(
        vllm_load_engine, "take_core", lambda number: happened.append(f"core of round {number}")
    )
    engine: Any = SimpleNamespace(worker=None)
    answers: Any = SimpleNamespace(write=happened.append, flush=lambda: None)
    requests = lines()
    for number in range(3):
        line = vllm_load_engine._exchange(engine, {"answer": number}, requests, answers)
        happened.append(str(line))
    before, after = (["paused"], ["goes on"]) if protected else ([], [])
    assert happened == [
        *before, '{"answer": 0}', "\n", "waits", *after, "as alone", "core of round 5", '["decode", 5]',
        *before, '{"answer": 1}', "\n", "waits", *after, "as alone", "core of round 6", '["single", 6]',
        *before, '{"answer": 2}', "\n", *after, "None",
    ]  # fmt: skip
