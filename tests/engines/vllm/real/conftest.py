"""Real vLLM engines in this process. Collected only where vLLM is installed (make test-vllm)."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import CONTEXT

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
elif not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # small functions are compiled in any case, for seconds

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_CI_ENV="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    KV_CANARY_MODE="log",
    KV_CANARY_ENDPOINT="inproc",
    KV_CANARY_VERIFY_ON_HIT="1",
)
CONTEXT.set_forkserver_preload([] if torch.cuda.is_available() else ["tests.engines.vllm.real.preloaded"])
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A core for each of pytest's workers: on shared ones each engine's threads wait for the other's.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(int(worker.removeprefix("gw")) % (os.cpu_count() or 1))


def pytest_sessionfinish() -> None:
    """What `Rig` froze is let go in order, without complaints of the libraries that it belongs to."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from tests.engines.vllm.real.models import make_model

    root = tmp_path_factory.mktemp("models")
    return lambda name: make_model(root, name)


MakeRig = Callable[..., Any]


@pytest.fixture
def make_rig(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    from tests.engines.vllm.real.rig import Rig

    made: list[Rig] = []

    def make(model: str = "llama", *, canary: dict[str, str] | None = None, **engine: Any) -> Rig:
        for rig in made:
            rig.close()
        made.clear()
        for name, value in (canary or {}).items():
            monkeypatch.setenv(f"KV_CANARY_{name.upper()}", value)
        rig = Rig(models(model), **engine)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()
