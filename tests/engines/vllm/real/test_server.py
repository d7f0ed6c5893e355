"""vLLM's OpenAI server with two tensor-parallel workers, and the service in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.engines.vllm.real.server import Process, call, start_vllm
from tests.ops.runbook_commands import of_kind


@pytest.fixture
def folder() -> Iterator[Path]:
    # Unix socket paths are short: pytest's own folders may not be.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kvc") as name:
        yield Path(name)


def wait_until(condition: Any, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.1)
    return found


def run_the_runbooks_commands(engine_url: str) -> None:
    """Those for vLLM, as they are printed."""
    for command in of_kind("vllm"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.script], env=os.environ | {"ENGINE_URL": engine_url},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert command.promises(done.stdout), (command, done.stdout)


def test_sweeps_reach_every_rank_and_a_dead_worker_is_seen(
    models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # allows /reset_prefix_cache
    engine, web = free_port(), free_port()
    endpoint = f"ipc://{folder}/service.sock"
    served = [sys.executable, "-m", "canary_obs", "serve", "--endpoint", endpoint, "--port", str(web)]
    service = Process(served, {}, folder / "service.log")
    model = models("llama")
    vllm = start_vllm(model, engine, folder / "vllm.log", 2, {"mode": "log", "endpoint": endpoint})
    base, canary = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{web}"
    answers: list[int] = []

    def ask(number: int) -> None:
        prompt = [10 + (number * 7 + i) % 900 for i in range(150)]
        body = {"model": str(model), "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
        answers.append(call(f"{base}/v1/completions", body)[0])

    def ranks() -> list[Any]:
        found: list[Any] = call(f"{canary}/canary/status")[1]["ranks"]
        return found

    try:
        service.wait_for(f"{canary}/healthz")
        vllm.wait_for(f"{base}/health")
        wait_until(lambda: len(ranks()) == 2)
        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        wait_until(lambda: all(rank["snapshot"] and rank["snapshot"]["step"] > 3 for rank in ranks()))
        status, busy = call(f"{canary}/canary/sweep?wait=true", {})
        assert (status, busy["status"]) == (200, "passed")
        for client in clients:
            client.join()
        assert answers == [200] * 4
        run_the_runbooks_commands(base)
        status, idle = call(f"{canary}/canary/sweep?wait=true", {})
        assert (status, idle["status"]) == (200, "passed")
        assert sorted(rank["key"][2] for rank in idle["ranks"]) == [0, 1]
        assert all(rank["progress"]["checked"] >= 4 * 128 for rank in idle["ranks"])
        seen = ranks()
        assert {rank["state"] for rank in seen} == {"ok"}
        os.kill(seen[1]["identity"]["pid"], signal.SIGKILL)
        dead = seen[1]["identity"]["rank"]
        state = wait_until(
            lambda: next(r["state"] for r in ranks() if r["identity"]["rank"] == dead) in ("blind", "off")
        )
        assert state
        assert service.alive
        assert call(f"{canary}/healthz")[0] == 200
    finally:
        vllm.stop()
        service.stop()
