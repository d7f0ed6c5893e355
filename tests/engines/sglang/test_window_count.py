"""What the divergence report needs of a GPU, without waiting for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang import window_count
from canary_obs.engines.sglang.window_count import WindowCount
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from tests.engines.sglang.test_node_walk import Arrival

CPU = torch.device("cpu")


def count_of(mapping: list[int], live: int) -> WindowCount:
    """Of 20 full slots; the mapping has a last place, which stands for -1."""
    full: Any = SimpleNamespace(size=20, available_size=lambda: 20 - live)
    return WindowCount(torch.tensor([*mapping, -1]), full, ForwardStream(CPU))


def test_tokens_by_the_allocators() -> None:
    """Of six live slots, one has left the window, and of the others two have other numbers there."""
    found = count_of([0, 1, 2, 8, 4, 9], live=6).newest(wait=False)
    assert found is not None
    assert (found.full, found.windowed) == (("full",), ("swa",))
    assert (found.out_of_window, found.diverging) == (1, 2)


def on_a_device(count: WindowCount, monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    """Its counts arrive when a test says so."""
    arrivals: list[Arrival] = []
    start = count._start

    def begin() -> window_count._Coming:
        arrivals.append(Arrival())
        return start()._replace(arrived=arrivals[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(count, "_start", begin)
    return arrivals


def test_a_count_that_has_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_of([0, 1, 2], live=2)
    arrivals = on_a_device(count, monkeypatch)
    assert count.newest(wait=False) is None
    count._mapping[1] = 7  # after the count was begun
    assert count.newest(wait=False) is None
    arrivals[0].happened = True
    first = count.newest(wait=False)
    assert first is not None
    assert first.diverging == 0
    assert count.newest(wait=False) is None  # each report has a count of its own
    arrivals[1].happened = True
    second = count.newest(wait=False)
    assert second is not None
    assert second.diverging == 1
    assert [arrival.waits for arrival in arrivals] == [0, 0]


def test_where_nothing_else_runs_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_of([0, 1, 2], live=2)
    arrivals = on_a_device(count, monkeypatch)
    assert count.newest(wait=True) is not None
    assert [arrival.waits for arrival in arrivals] == [1]
