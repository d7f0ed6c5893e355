"""Public reports of corrupted KV, rebuilt on a real SGLang: see tests/replays."""

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
    from tests.replays.sglang_engines import build

    made: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:

        def get(name: str) -> Any:
            if name not in made:
                for old in made.values():
                    old.close()
                made.clear()
                storage = tmp_path_factory.mktemp(name)
                patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(storage))
                made[name] = build(name, models, storage)
            return made[name]

        for setting, value in SETTINGS.items():
            patch.setenv(f"KV_CANARY_{setting.upper()}", value)
        yield get
        for old in made.values():
            old.close()


@pytest.mark.parametrize("name", on("sglang"))
def test_replay(engine: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.replays.sglang_engines import fresh

    replay = REPLAYS[name]
    rig = engine(replay.rig)
    fresh(rig)
    run = Run(step=lambda: rig.canary.step, patch=monkeypatch)
    replay.perform(rig, run)
    monkeypatch.undo()
    rig.settle()
    assert run.outcome(rig.found) == (replay.finds, replay.steps)
    assert not rig.canary.health.faults
