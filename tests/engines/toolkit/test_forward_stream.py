"""What the idle thread of an engine on another GPU enters; no GPU is needed to see that."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.forward_stream import ForwardStream


def side_stream(calls: list[object]) -> Any:
    return SimpleNamespace(join=lambda: calls.append("joined"))


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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    forwards = ForwardStream(torch.device("cuda:1"))
    forwards.remember()
    with forwards.context(side_stream(entered)):
        assert entered == [torch.device("cuda:1"), stream, "joined"]
    assert entered == ["joined"]


def test_the_stream_of_the_first_forward_tells_whether_the_device_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = [False]
    streams = iter([SimpleNamespace(query=lambda: done[0])])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: next(streams))
    forwards = ForwardStream(torch.device("cuda:0"))
    assert not forwards.busy
    forwards.remember()
    forwards.remember()
    assert forwards.busy
    done[0] = True
    assert not forwards.busy


def test_on_a_cpu_nothing_is_entered() -> None:
    calls: list[object] = []
    forwards = ForwardStream(torch.device("cpu"))
    forwards.remember()
    with forwards.context(side_stream(calls)):
        assert calls == []
    assert not forwards.busy
