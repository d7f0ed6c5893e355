"""Records what a step of a real vLLM does, in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.check_stream import CheckStream
from canary_obs.engines.toolkit.side_stream import SideStream, WaitFor
from tests.engines.vllm.real.rig import Rig


class RecordingSideStream(SideStream):
    """Records where launches would run."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(torch.device("cpu"), enabled=False)
        self.calls = calls

    def mark(self) -> None:
        self.calls.append("mark")

    def enter(self, wait_for: WaitFor) -> None:
        self.calls.append(wait_for.name)

    def leave(self) -> None:
        self.calls.append("leave")

    def join(self) -> None:
        self.calls.append("join")


def record(owner: Any, name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    method = getattr(owner, name)

    def recorded(*given: Any, **named: Any) -> Any:
        calls.append(name)
        return method(*given, **named)

    monkeypatch.setattr(owner, name, recorded)


def recorded_calls(rig: Rig, monkeypatch: pytest.MonkeyPatch, *of_runner: str) -> list[str]:
    """Calls from now on, in order: canary, model, side stream and these methods of the runner."""
    calls: list[str] = []
    idle = rig.adapter.hooks.idle_thread
    assert idle is not None, "attached"
    idle.stop()
    for name in ("before_write", "forward_launched", "after_forward", "after_step"):
        record(rig.canary, name, calls, monkeypatch)
    for name in ("forward", "compute_logits"):
        record(rig.runner.model, name, calls, monkeypatch)
    for name in of_runner:
        record(rig.runner, name, calls, monkeypatch)
    busy: Any = SimpleNamespace(busy=True)  # else checks would be in line from the sixteenth step on
    chosen = CheckStream(busy, side_stream := RecordingSideStream(calls))
    with chosen.entered():  # by the step before
        pass
    monkeypatch.setattr(rig.adapter.hooks, "side_stream", side_stream)
    monkeypatch.setattr(rig.adapter.hooks, "_check_stream", chosen)
    calls.clear()
    return calls
