"""The pod of docker/kubernetes as processes, with two workers of a real vLLM, and who operates it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.engines.vllm.real.operator_commands import (
    CommandLine,
    operate_on_an_incident,
    operate_while_all_is_well,
)
from tests.engines.vllm.real.pod import ROOT, Pod
from tests.engines.vllm.real.server import call, wait_until
from tests.ops.runbook_commands import of_kind

INJECT = "token-of-those-who-may-drill"
# One fault, long after what must pass without one.
FAULT = {
    "PERTURB_ENABLED": "true",
    "PERTURB": "real_kv_used=1",
    "PERTURB_GROUP": "full",
    "PERTURB_LIMIT": "1",
}
WARMUP = 1500  # steps
DRILL = {"KV_CANARY_DRILL_ENABLED": "true"}


@pytest.fixture
def folder() -> Iterator[Path]:
    # Unix socket paths are short: pytest's own folders may not be.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kvc") as name:
        yield Path(name)


@pytest.fixture
def pod(models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # allows /reset_prefix_cache
    fault = {f"KV_CANARY_{name}": value for name, value in FAULT.items()}
    built = Pod(
        folder=folder, model=models("llama"), ports={8000: free_port(), 9464: free_port()},
        engine_env=DRILL | fault | {"KV_CANARY_PERTURB_WARMUP": str(WARMUP)}, service_env=DRILL,
    )  # fmt: skip
    built.path("/etc/kv-canary").mkdir()
    make_tokens(built.path("/etc/kv-canary"))
    try:
        built.start()
        yield built
    finally:
        built.stop()


def make_tokens(folder: Path) -> None:
    """As docs/production.md says, and one that may inject."""
    page = (ROOT / "docs/production.md").read_text("utf-8")
    (script,) = re.findall(r"^```sh\n(umask 077\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, check=True, timeout=120)
    with (folder / "tokens.toml").open("a") as tokens:
        tokens.write(f'\n[drills]\ntoken = "{INJECT}"\nscopes = ["inject"]\n')
    (oncall,) = re.findall(r'\[oncall\]\ntoken = "(\w+)"', (folder / "tokens.toml").read_text())
    (folder / "oncall").write_text(oncall)
    (folder / "drills").write_text(INJECT)


def run_the_runbooks_commands(engine_url: str) -> None:
    """Those for vLLM, as they are printed."""
    for command in of_kind("vllm"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.script], env=os.environ | {"ENGINE_URL": engine_url},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert command.promises(done.stdout), (command, done.stdout)


def test_a_checkout_below_a_mount_runs_its_own_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/tmp/checkout/.venv/bin/python")
    pod = Pod(folder=folder, model=folder, ports={})
    command, *arguments = pod.here(["canary-obs", "/tmp/file"])
    assert (command, arguments) == ("/tmp/checkout/.venv/bin/canary-obs", [str(folder / "tmp" / "file")])


@pytest.mark.timeout(600)
def test_it_is_operated_by_commands_and_a_dead_worker_is_seen(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, canary = (f"http://127.0.0.1:{port}" for port in pod.ports.values())
    tokens = pod.path("/etc/kv-canary")
    answers: list[int] = []

    def ask(number: int) -> None:
        prompt = [10 + (number * 7 + i) % 900 for i in range(150)]
        body = {"model": str(pod.model), "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
        answers.append(call(f"{base}/v1/completions", body)[0])

    def ranks() -> list[Any]:
        found: list[Any] = pod.ask_service("/canary/status")["ranks"]
        return found

    service, engine = pod.processes["kv-canary"], pod.processes["engine"]
    service.wait_for(f"{canary}/readyz")
    assert [pod.probe("kv-canary", kind) for kind in ("startup", "liveness")] == [200, 200]
    engine.wait_for(f"{base}/health")
    assert [pod.probe("engine", kind) for kind in ("startup", "readiness", "liveness")] == [200] * 3
    compiled = pod.path("/opt/canary-obs").glob("canary_obs/engines/vllm/__pycache__/*.pyc")
    assert any(compiled), "the engine imports what the init container wrote"
    wait_until(lambda: len(ranks()) == 2)
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    wait_until(lambda: all(rank["snapshot"] and rank["snapshot"]["step"] > 3 for rank in ranks()), 240.0)
    assert pod.ask_service("/canary/sweep?wait=true", {})["status"] == "passed"
    for client in clients:
        client.join()
    assert answers == [200] * 4
    run_the_runbooks_commands(base)
    idle = pod.ask_service("/canary/sweep?wait=true", {})
    assert idle["status"] == "passed"
    assert sorted(rank["key"][2] for rank in idle["ranks"]) == [0, 1]
    assert all(rank["progress"]["checked"] >= 4 * 128 for rank in idle["ranks"])
    # A rank that two busy cores kept from hearing the service for 5 s says so, until it hears it again.
    wait_until(lambda: {rank["state"] for rank in ranks()} == {"ok"})
    seen = ranks()
    assert {rank["identity"]["instance"] for rank in seen} == {"engine-0"}, "the pod's name"

    monkeypatch.setenv("COLUMNS", "200")  # where xdist runs the test, the terminal is narrow
    monkeypatch.setenv("KV_CANARY_URL", canary)
    monkeypatch.setenv("KV_CANARY_TOKEN_FILE", str(tokens / "oncall"))
    monkeypatch.setenv("KV_CANARY_ENDPOINT", f"ipc://{pod.path('/run/canary')}/socket/service.sock")
    cli = CommandLine(capsys.readouterr)
    operate_while_all_is_well(cli, 2, str(tokens / "drills"))
    # It comes after WARMUP steps, 100 of which are one request.
    wait_until(lambda: ask(0) or any(rank["state"] == "violated" for rank in ranks()), 240.0)
    operate_on_an_incident(cli)

    os.kill(seen[1]["identity"]["pid"], signal.SIGKILL)
    dead = seen[1]["identity"]["rank"]
    state = wait_until(
        lambda: next(r["state"] for r in ranks() if r["identity"]["rank"] == dead) in ("blind", "off")
    )
    assert state
    cli.until("status", 4)
    assert service.alive
    assert pod.probe("kv-canary", "liveness") == 200
