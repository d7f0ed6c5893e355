"""Public reports of corrupted KV, rebuilt on a real vLLM: see tests/replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.replays.replay import SETTINGS, Run, collected, on

REPLAYS = collected()


@pytest.fixture(scope="module")
def engine(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """An engine by its name; the one before is closed."""
    from tests.replays.vllm_engines import build, rig_of

    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            for old in made.values():
                rig_of(old).close()
            made.clear()
            made[name] = build(name, models, tmp_path_factory.mktemp(name))
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        for setting, value in SETTINGS.items():
            patch.setenv(f"KV_CANARY_{setting.upper()}", value)
        yield get
        for old in made.values():
            rig_of(old).close()


@pytest.mark.parametrize("name", on("vllm"))
def test_replay(engine: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.replays.vllm_engines import rig_of

    replay = REPLAYS[name]
    made = engine(replay.rig)
    rig = rig_of(made)
    rig.fresh()
    run = Run(step=lambda: rig.canary.step, patch=monkeypatch)
    replay.perform(made, run)
    monkeypatch.undo()
    rig.finish()
    rig.settle()
    assert run.outcome(rig.found) == (replay.finds, replay.steps)
    assert not rig.canary.health.faults
