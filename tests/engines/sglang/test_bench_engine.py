"""The bench's engines: one that waits for its turn leaves the device to the one under load."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from canary_obs.bench import sglang_engine, sglang_taps
from canary_obs.bench.sglang_loads import SglangEngine
from canary_obs.engines.sglang import scheduler_canary


def test_a_canary_is_paused_while_its_engine_waits_for_a_load(tmp_path: Path) -> None:
    run = SimpleNamespace(paused=False)
    scheduler = SimpleNamespace()
    vars(scheduler)[scheduler_canary._ATTRIBUTE] = SimpleNamespace(runtime=SimpleNamespace(run=run))

    def ask(what: str) -> Any:
        sglang_taps._command(scheduler, what, str(tmp_path / "answer"))
        return json.loads((tmp_path / "answer").read_text("utf-8"))

    seen = []

    def lines() -> Any:
        for line in "ab":
            seen.append(run.paused)
            yield line

    engine = SglangEngine(None, ask, 9)
    assert [(line, run.paused) for line in sglang_engine._requests(engine, lines())] == [
        ("a", False), ("b", False),
    ]  # fmt: skip
    assert seen == [True, True]
    assert not run.paused
