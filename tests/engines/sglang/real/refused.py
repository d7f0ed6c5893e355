"""A service over HTTP, and what it has to tell of an engine that serves unprotected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.engines.toolkit.service_process import free_port
from tests.engines.vllm.real.server import Process, call, wait_until


@contextmanager
def web_service() -> Iterator[tuple[str, str]]:
    """A service's endpoint and address; the endpoint is in a folder of its own."""
    port = free_port()
    with TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{folder}/s.sock"
        command = [sys.executable, "-m", "canary_obs", "serve", "--endpoint", endpoint, "--port", str(port)]
        process, address = Process(command, {}, Path(folder) / "service.log"), f"http://127.0.0.1:{port}"
        try:
            process.wait_for(f"{address}/healthz")
            yield endpoint, address
        finally:
            process.stop()


def assert_told(address: str, named: str) -> None:
    """State, reason, metric and sweep of a service: one engine is blind, and why."""

    def ranks() -> list[Any]:
        held = call(f"{address}/canary/status")[1]["ranks"]
        return [rank for rank in held if rank["snapshot"] and named in rank["reasons"][0]]

    (rank,) = wait_until(ranks)
    assert rank["state"] == "blind"
    own = f'instance="{rank["identity"]["instance"]}"'
    lines = [line for line in call(f"{address}/metrics")[1].splitlines() if own in line]
    for name, label in (("state", 'state="blind"'), ("observer_faults_total", 'part="attach"')):
        (line,) = (line for line in lines if line.startswith(f"kv_canary_{name}{{") and label in line)
        assert line.endswith("} 1.0")
    status, sweep = call(f"{address}/canary/sweep?wait=true", {})
    assert (status, sweep["status"]) == (200, "failed")
    assert any(named in (each["error"] or "") for each in sweep["ranks"])
