"""Where the idle thread's work goes, told by what it enters: no GPU is needed to see that."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from canary_obs.engines.vllm.adapter import VllmAdapter


def idle_adapter(device: str, stream: object, joined: list[object]) -> VllmAdapter:
    adapter = object.__new__(VllmAdapter)
    adapter.runner = SimpleNamespace(device=torch.device(device))
    adapter._stream = stream
    adapter.side_stream = SimpleNamespace(join=lambda: joined.append("joined"))
    return adapter


@pytest.mark.parametrize("stream", [None, "the forward's"])
def test_the_engines_gpu_is_the_current_one_also_before_the_first_forward(
    monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    entered: list[object] = []

    @contextmanager
    def entering(what: object):
        entered.append(what)
        yield
        entered.remove(what)

    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(torch.cuda, "stream", entering)
    with idle_adapter("cuda:1", stream, entered)._surroundings():
        assert entered == [torch.device("cuda:1"), stream, "joined"]
    assert entered == ["joined"]


def test_on_a_cpu_nothing_is_entered() -> None:
    joined: list[object] = []
    with idle_adapter("cpu", None, joined)._surroundings():
        assert joined == []
