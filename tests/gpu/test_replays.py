"""On a GPU the checks of a batch that repeats are one CUDA graph: it finds the same, and takes no memory."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import pytest
import torch

from canary_obs.runtime.device import replays
from tests.runtime.steady import Steady
from tests.runtime.test_replays import EVENTS, run

MEBIBYTE = 1 << 20
PER_GRAPH = MEBIBYTE


def test_a_graph_finds_what_the_launches_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "REPEATS", 3)
    for seed in range(6):
        draw = random.Random(seed)
        events = [draw.choice(EVENTS) for _ in range(60)]
        replayed = run(events, replaying=True, backend="triton", device="cuda")
        assert replayed[0] == run(events, replaying=False, backend="triton", device="cuda")[0]
        assert replayed[1] == sum(event != "invalidated" for event in events[3:])


def test_graphs_take_little_memory(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(replays, "REPEATS", 1)
    engine = Steady(2 * replays.KEPT, "cuda")
    checks = engine.canary._checks
    views = [engine.view_of(count) for count in range(1, 2 * replays.KEPT + 1)]
    before, taken = 0, []
    for number, view in enumerate((*views, *views)):
        if number == 2:  # a first graph takes what all of them share
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info()[0]
        engine.view = view
        engine.adapter.counted["full"] += 1
        engine.canary.before_write(view)
        engine.canary.forward_launched(view)
        engine.canary.after_forward(view)
        taken.append(before - torch.cuda.mem_get_info()[0] if before else 0)
    assert checks.replays is not None
    assert checks.replays.captured == len(views) * 2
    with capsys.disabled():
        print(f"\nmemory of {replays.KEPT} graphs: {max(taken) / MEBIBYTE:.1f} MiB")
    assert max(taken) < replays.KEPT * PER_GRAPH
    engine.close()


def test_host_time(capsys: Any) -> None:
    """Of forward_launched and after_forward together, for each number of requests, with and without."""
    for count in (1, 64):
        medians: dict[bool, list[float]] = {}
        for replaying in (False, True, False, True):
            engine = Steady(count, "cuda")
            if not replaying:
                engine.canary._checks.replays = None
            spent: list[float] = []
            for _ in range(200):
                engine.adapter.counted["full"] += 1
                engine.canary.before_write(engine.view)
                time.sleep(0.002)  # a forward, during which caches go cold
                started = time.perf_counter()
                engine.canary.forward_launched(engine.view)
                engine.canary.after_forward(engine.view)
                spent.append(time.perf_counter() - started)
                engine.canary.after_step()
            medians.setdefault(replaying, []).append(round(1e6 * statistics.median(spent[100:]), 1))
            kept = engine.canary._checks.replays
            assert (0 if kept is None else kept.replayed) == (200 - replays.REPEATS if replaying else 0)
            engine.close()
        with capsys.disabled():
            print(f"\n{count} requests, us: one by one {medians[False]}, replayed {medians[True]}")
