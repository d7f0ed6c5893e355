"""The bench's engines: one that waits for its turn leaves the device to the one under load."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.bench import sglang_engine, sglang_taps
from canary_obs.bench.sglang_loads import SglangEngine
from canary_obs.engines.sglang import scheduler_canary


class _Runtime:
    idled = 0

    def idle(self) -> bool:
        self.idled += 1
        return True


def test_a_canary_does_nothing_while_its_engine_waits_for_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each load begins at the speed of an engine that is alone on its GPU."""
    runtime, scheduler = _Runtime(), SimpleNamespace()
    vars(scheduler)[scheduler_canary._ATTRIBUTE] = SimpleNamespace(runtime=runtime)
    happened: list[Any] = []
    monkeypatch.setattr(sglang_taps, "launch_as_alone", lambda: happened.append("as alone"))
    monkeypatch.setattr(sglang_taps, "take_core", lambda number: happened.append(f"core of round {number}"))

    def ask(what: str, seed: int = 0) -> Any:
        sglang_taps._command(scheduler, what, str(tmp_path / "answer"), seed)
        return json.loads((tmp_path / "answer").read_text("utf-8"))

    def note(what: str) -> None:
        happened.append((what, runtime.idle(), runtime.idled))

    def lines() -> Any:
        for line in ('["decode", 5]', '["few", 6]'):
            note("waits")
            yield line

    for line in sglang_engine._requests(SglangEngine(None, ask, 9), lines()):
        note(line)
    assert happened == [
        ("waits", False, 0), "as alone", "core of round 5", ('["decode", 5]', True, 1),
        ("waits", False, 1), "as alone", "core of round 6", ('["few", 6]', True, 2),
        "as alone", "core of round 0",
    ]  # fmt: skip
    assert runtime.idle(), "as it was"
