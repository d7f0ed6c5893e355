"""From an engine's hook to a kernel's launch are at most five calls, as docs/architecture.md draws them."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from canary_kernels.checks import Backend
from canary_obs import CanaryConfig, install_canary
from canary_obs.config import IN_PROCESS
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import tiny
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime import canary

MOST_CALLS = 5
HOOK = "shown_forward.py"  # the wrapper around the engine's forward
COMPILATION = ("_prepare", "prepare", "<listcomp>")

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter tells who launches")


def test_from_hook_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: set[tuple[str, ...]] = set()

    def recorded(*given: Any, **named: Any) -> None:
        """Instead of a launch: what the kernels would do is not looked at."""
        frames = traceback.extract_stack()[:-1]
        names = [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]
        hooks = [at for at, name in enumerate(names) if name.startswith(HOOK)]
        if hooks:
            calls = zip(names[hooks[-1] + 1 :], frames[hooks[-1] + 1 :], strict=True)
            ours = [name for name, frame in calls if "/canary_" in Path(frame.filename).as_posix()]
            # In the interpreter each launch goes through the compilation that a GPU needs only once.
            paths.add(tuple(name for name in ours if name.split(":")[1] not in COMPILATION))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    # Compiles what the interpreter does not compile, on batches of 8192 tokens.
    monkeypatch.setattr(canary, "warm_up", lambda *_: None)
    engine = Engine(tiny(seed=1))
    config = CanaryConfig(
        endpoint=IN_PROCESS,
        backend=Backend.TRITON.value,
        patrol_budget="0",
        idle_sweep=False,
        layer_data=True,
    )
    runtime = install_canary(engine, config)
    assert runtime is not None
    runtime.mark_ready()
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 3)
    while engine.statistics.steps < 4:
        traffic.advance(engine)
        if engine.has_work():
            engine.step()
    runtime.detach()
    operations = {part for path in paths for part in path if part.startswith("op.py:")}
    assert operations == {
        "op.py:compare_slots",
        "op.py:write_identities",
        "op.py:verify_rows",
        "op.py:complete_slots",
        "op.py:note_layer",
        "op.py:check_layer",
    }
    assert {path for path in paths if len(path) > MOST_CALLS} == set()
