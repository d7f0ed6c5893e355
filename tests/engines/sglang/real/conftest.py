"""Real SGLang schedulers in this process. Collected only where SGLang is installed (make test-sglang)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["*"]
else:
    from tests.engines.sglang.real import stand_ins

    os.environ.update(HF_HUB_OFFLINE="1", KV_CANARY_MODE="log", KV_CANARY_ENDPOINT="inproc")
    os.environ["KV_CANARY_VERIFY_ON_HIT"] = "1"
    os.environ.update(TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")  # for drafts; before Triton is imported
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        # A core for each of pytest's workers: on shared ones each engine's threads wait for the other's.
        core = int(worker.removeprefix("gw")) % (os.cpu_count() or 1)
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = str(core)
    stand_ins.install()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from sglang.srt.plugins import load_plugins

    from tests.engines.sglang.real.models import make_model

    load_plugins()  # once per process, before a test sets another mode
    root = tmp_path_factory.mktemp("models")
    return lambda name: make_model(root, name)


@pytest.fixture
def make_rig(models: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    from tests.engines.sglang.real.rig import Rig

    made: list[Rig] = []

    def make(model: str = "llama", **settings: Any) -> Rig:
        for rig in made:
            rig.close()
        made.clear()
        made.append(Rig(models(model), **settings))
        return made[0]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def make_drafting(
    make_rig: Callable[..., Any], models: Callable[[str], Path], tmp_path: Path
) -> Callable[..., Any]:
    """A scheduler that drafts, by the name of its kind."""
    from tests.engines.sglang.real import drafting
    from tests.engines.sglang.real.draft_kinds import model_of_kind, settings_of_kind

    drafting.install()
    return lambda kind, **settings: make_rig(
        model_of_kind(kind), **settings_of_kind(kind, models, tmp_path), **settings
    )
