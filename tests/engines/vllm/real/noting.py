"""Writes down what a step of a real vLLM does, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.side_stream import SideStream
from tests.engines.vllm.real.rig import Rig


class NotedAside(SideStream):
    """Tells where launches would go."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(torch.device("cpu"), enabled=False)
        self.calls = calls

    def mark(self) -> None:
        self.calls.append("mark")

    def enter(self, behind: Any) -> None:
        self.calls.append(behind.name)

    def leave(self) -> None:
        self.calls.append("leave")

    def join(self) -> None:
        self.calls.append("join")


def note(owner: Any, name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    method = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(name)
        return method(*given, **named)

    monkeypatch.setattr(owner, name, noted)


def noted_calls(rig: Rig, monkeypatch: pytest.MonkeyPatch, *of_runner: str) -> list[str]:
    """Of the canary, the model, the stream beside, and the runner's methods that are named; in order."""
    calls: list[str] = []
    idle = rig.adapter.hooks.idle_thread
    assert idle is not None, "attached"
    idle.stop()
    for name in ("before_write", "forward_launched", "after_forward", "after_step"):
        note(rig.canary, name, calls, monkeypatch)
    for name in ("forward", "compute_logits"):
        note(rig.runner.model, name, calls, monkeypatch)
    for name in of_runner:
        note(rig.runner, name, calls, monkeypatch)
    monkeypatch.setattr(rig.adapter.hooks, "side_stream", NotedAside(calls))
    return calls
