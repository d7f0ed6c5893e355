"""What cannot be protected is said, and vLLM serves as ever."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.engines.vllm import placement, worker
from canary_obs.errors import UnsupportedEngine
from canary_obs.pipeline.hub import Hub
from canary_obs.pipeline.listener import ZmqListener
from canary_obs.records import State
from tests.engines.vllm.real.rig import prompts
from tests.engines.vllm.real.test_server import wait_until


def unexplained(layer: Any) -> Any:
    raise placement._unexplained(layer, "bytes all over the place")


def other_version(_runner: Any) -> Any:
    from canary_obs.engines.vllm.versions import check_version

    check_version("0.31.7")


@pytest.mark.parametrize(
    ("where", "instead", "named"),
    [
        ("canary_obs.engines.vllm.groups.find_placements", unexplained, "bytes all over the place"),
        ("canary_obs.engines.vllm.worker.adapter_of", other_version, "vLLM 0.31.7: supported are 0.32"),
    ],
)
def test_engine_serves_and_the_service_is_told(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, where: str, instead: Any, named: str
) -> None:
    monkeypatch.setattr(where, instead)
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        hub = Hub(ServiceConfig(endpoint=endpoint))
        listener = ZmqListener(endpoint, hub)
        try:
            rig = make_rig(canary={"endpoint": endpoint})
            assert worker.runtime_of(rig.worker) is None
            assert len(rig.generate(prompts(2), 4)) == 2
            ranks = wait_until(lambda: [rank for rank in hub.ranks() if rank.snapshot])
            assert ranks[0].state is State.BLIND
            assert named in ranks[0].reasons[0]
            assert named in caplog.text
            rig.close()
        finally:
            listener.close()


def test_a_method_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from canary_obs.engines.vllm import versions

    path = "vllm.v1.core.block_pool:BlockPool"
    monkeypatch.setitem(versions.SEAMS, path, {"touch": ("request",)})
    with pytest.raises(UnsupportedEngine, match="touch has parameters"):
        versions.check_seams()
