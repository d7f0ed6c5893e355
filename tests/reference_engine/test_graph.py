"""Captured decode graphs, as far as no GPU is needed to see it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from canary_obs.reference_engine import settings
from canary_obs.reference_engine.cache.pool import KVPool
from canary_obs.reference_engine.execution.graph import DecodeGraphs
from canary_obs.reference_engine.model.llama import Llama, random_weights


class Node:
    """Part of a cycle: only a collection frees it, as the graphs of an engine that is gone."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def eager() -> Iterator[None]:
    """A collection whenever anything is made."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("eager")
def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA frees no graph while it captures one: it gives up the capture."""
    capturing, freed = [False], []

    @contextmanager
    def capture(_: object, pool: object) -> Iterator[None]:
        capturing[0] = True
        yield
        capturing[0] = False

    def run(_: object, size: int) -> torch.Tensor:
        weakref.finalize(Node(), lambda: freed.append(capturing[0]))
        made = [Node() for _ in range(100)]
        assert len(made) == 100
        return torch.zeros(size, 1)

    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None))
    monkeypatch.setattr(DecodeGraphs, "_run", run)
    config, device = settings.tiny(), torch.device("cpu")
    weights = random_weights(config.shape, config.seed, config.dtype, device)
    model = Llama(config.shape, weights, config.max_context, device, None)
    DecodeGraphs(model, KVPool(config.shape, config), 8)
    gc.collect()
    assert len(freed) == 4 * 3  # sizes 1, 2, 4, 8: two runs to warm up and the one that is captured
    assert not any(freed)
    assert gc.isenabled()
