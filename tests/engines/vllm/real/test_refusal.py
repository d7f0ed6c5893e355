"""vLLM keeps serving when it cannot be protected, and the reason is reported."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.engines.vllm import plugin, worker
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations import placement
from tests.engines.vllm.real.rig import prompts
from tests.engines.vllm.real.server import Process, call, wait_until


def unexplained(layer: Any, *_: Any) -> Any:
    raise placement._unsupported_layout(layer, "bytes all over the place")


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM version that is not supported, as the plugin sees it."""
    plugin.unregister()
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.25.0")
        plugin.register()
        yield
    plugin.unregister()
    plugin.register()


@pytest.fixture
def unexplained_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that scatters what it writes."""
    monkeypatch.setattr("canary_obs.engines.vllm.groups.find_placements", unexplained)


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("unexplained_layout", "bytes all over the place"),
        ("other_version", "vLLM 0.25.0: supported are"),
    ],
)
def test_the_engine_serves_and_log_api_and_metric_say_why(
    make_rig: Any, request: pytest.FixtureRequest, caplog: Any, tmp_path: Path, reason: str, named: str
) -> None:
    request.getfixturevalue(reason)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        command = [sys.executable, "-m", "canary_obs", "serve", "--endpoint", endpoint, "--port", str(port)]
        service, base = Process(command, {}, tmp_path / "service.log"), f"http://127.0.0.1:{port}"
        try:
            service.wait_for(f"{base}/healthz")
            rig = make_rig(canary={"endpoint": endpoint})
            assert worker.runtime_of(rig.worker) is None
            assert "execute_model" not in vars(rig.runner)
            assert len(rig.generate(prompts(2), 4)) == 2
            (rank,) = wait_until(
                lambda: [rank for rank in call(f"{base}/canary/status")[1]["ranks"] if rank["snapshot"]]
            )
            assert rank["state"] == "blind"
            assert named in rank["reasons"][0]
            assert named in caplog.text
            metrics = call(f"{base}/metrics")[1]
            assert 'rank="0",state="blind"} 1.0' in metrics
            assert 'part="attach",rank="0"} 1.0' in metrics
            # On a machine that stood still the rank is silent, which is 503, until its next snapshot.
            status, sweep = wait_until(
                lambda: found if (found := call(f"{base}/canary/sweep?wait=true", {}))[0] != 503 else None
            )
            assert (status, sweep["status"]) == (200, "failed")
            assert named in sweep["ranks"][0]["error"]
            rig.close()
        finally:
            service.stop()


def test_a_method_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from canary_obs.engines.vllm import versions

    path = "vllm.v1.core.block_pool:BlockPool"
    monkeypatch.setitem(versions.HOOKS, path, {"touch": ("request",)})
    with pytest.raises(UnsupportedEngine, match="touch has parameters"):
        versions.check_hooks()
