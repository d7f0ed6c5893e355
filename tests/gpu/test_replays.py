"""On a GPU the checks of a batch that repeats are one CUDA graph: it finds the same, and takes no memory."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch

from canary_kernels.forward_start import RING_ROWS
from canary_obs.runtime.device import replays
from canary_obs.vocabulary import State
from tests.runtime.steady import Steady
from tests.runtime.test_replays import EVENTS, repeat, run

MEBIBYTE = 1 << 20
PER_GRAPH = MEBIBYTE


@pytest.mark.parametrize("shown", [{}, {"launches": True}, {"launches": True, "window": 3}], ids=str)
def test_a_graph_finds_what_the_launches_find(monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]) -> None:
    monkeypatch.setattr(replays, "REPEATS", 3)
    monkeypatch.setattr(replays, "FORWARDS_WAITED", 0)
    for seed in range(4):
        draw = random.Random(seed)
        events = [draw.choice(EVENTS) for _ in range(60)]
        replayed = run(events, replaying=True, backend="triton", device="cuda", **shown)
        assert replayed[0] == run(events, replaying=False, backend="triton", device="cuda", **shown)[0]
        assert replayed[1] == len(events[3:]) + sum(event != "invalidated" for event in events[4:])


def test_the_host_may_be_as_far_ahead_as_the_ring_is_long() -> None:
    """The device is kept busy, so that every forward's columns wait for it."""
    engine = Steady(2, "cuda", launches=True)
    repeat(engine, 2)
    torch.cuda.synchronize()
    for _ in range(RING_ROWS - 1):
        torch.cuda._sleep(20_000_000)
        engine.step()
    torch.cuda.synchronize()
    assert int(engine.canary.state.clock) == engine.canary.state.now
    engine.canary.check_everything()
    engine.canary.counter_reader.drain(engine.canary.step, 1.0)
    assert not any("tokens" in reason for reason in engine.canary.verdict()[1]), engine.canary.verdict()
    assert engine.canary.verdict()[0] is not State.VIOLATED
    engine.close()


def test_graphs_take_little_memory(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(replays, "REPEATS", 1)
    engine = Steady(2 * replays.KEPT, "cuda")
    checks = engine.canary.checks
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
        assert checks.replays is not None
        checks.replays.end_forward(long=True)
        taken.append(before - torch.cuda.mem_get_info()[0] if before else 0)
    assert checks.replays is not None
    assert checks.replays.captured == len(views) * 2 * 2  # heads and tails, twice
    with capsys.disabled():
        print(f"\nmemory of {replays.KEPT} graphs: {max(taken) / MEBIBYTE:.1f} MiB")
    assert max(taken) < replays.KEPT * PER_GRAPH
    engine.close()


def test_host_time(capsys: Any) -> None:
    """Before a forward, and after it, for each number of requests, with and without."""
    for count in (1, 64):
        medians: dict[bool, list[tuple[float, ...]]] = {}
        for replaying in (False, True, False, True):
            engine = Steady(count, "cuda", launches=True)
            if not replaying:
                engine.canary.checks.replays = None
            spent: list[tuple[float, float]] = []
            for number in range(200):
                if engine.canary.checks.replays is not None and number == 2 * replays.REPEATS:
                    engine.canary.checks.replays.end_forward(long=True)
                engine.adapter.counted["full"] += 1
                assert engine.known is not None
                assert engine.view.launches is not None
                engine.known.begin(engine.names)
                engine.known.note(engine.names, np.ones((2, count), dtype=np.int64))
                engine.view.launches.due = True
                began = time.perf_counter()
                engine.canary.before_write(engine.view)
                before = time.perf_counter() - began
                time.sleep(0.002)  # a forward, during which caches go cold
                began = time.perf_counter()
                engine.canary.forward_launched(engine.view)
                engine.canary.after_forward(engine.view)
                spent.append((before, time.perf_counter() - began))
                engine.canary.after_step()
            middle = (round(1e6 * statistics.median(each), 1) for each in zip(*spent[100:], strict=True))
            medians.setdefault(replaying, []).append(tuple(middle))
            kept = engine.canary.checks.replays
            wanted = 2 * (200 - 2 * replays.REPEATS) if replaying else 0
            assert (0 if kept is None else kept.replayed) == wanted
            engine.close()
        with capsys.disabled():
            print(f"\n{count} requests, us: one by one {medians[False]}, replayed {medians[True]}")
