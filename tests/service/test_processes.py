"""The service and an engine as two real processes over a Unix socket; either is killed with SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.service.fakes import eventually

ROOT = Path(__file__).parents[2]
STEPS = 'kv_canary_steps_total{engine="fake",instance="test",rank="0"}'
SERVE = "from canary_obs.serve import serve; serve()"


class Processes:
    """A service and engines as processes in one folder, and an HTTP client of the service."""

    def __init__(self, folder):
        self.port = free_port()
        self.endpoint = f"ipc://{folder}/service.sock"
        self.processes = []
        self.env = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "KV_CANARY_ENDPOINT": self.endpoint,
            "KV_CANARY_PORT": str(self.port),
            "KV_CANARY_SNAPSHOT_STALE_SECONDS": "1",
        }

    def start(self, *command):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", *command], env=self.env, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def service(self):
        process = self.start("-c", SERVE)
        eventually(lambda: self.request("/healthz"), 30)
        return process

    def engine(self):
        return self.start(str(ROOT / "tests/service/fake_engine_process.py"), self.endpoint)

    def request(self, path, method="GET"):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.read().decode()
        except urllib.error.URLError:
            return None

    def steps(self):
        lines = (self.request("/metrics") or "").splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(STEPS)), 0.0)

    def status(self):
        return json.loads(self.request("/canary/status"))

    def kill(self, process):
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    processes.close()


def test_counters_survive_a_kill_of_either_side(processes):
    service, engine = processes.service(), processes.engine()
    eventually(lambda: processes.steps() > 20, 30)
    assert processes.status()["state"] == "ok"
    sweep = json.loads(processes.request("/canary/sweep?wait=true", "POST"))
    assert sweep["status"] == "passed"

    processes.kill(service)
    before_service = processes.steps()
    assert before_service == 0.0
    service = processes.service()
    eventually(lambda: processes.steps() > 20, 30)
    eventually(lambda: processes.status()["ranks"][0]["hello"], 30)
    assert json.loads(processes.request("/canary/sweep?wait=true", "POST"))["status"] == "passed"

    processes.kill(engine)
    last = processes.steps()
    eventually(lambda: processes.status()["state"] == "blind", 30)
    engine = processes.engine()
    seen = [last]

    def recovered():
        seen.append(processes.steps())
        return processes.status()["state"] == "ok" and seen[-1] > last + 20

    eventually(recovered, 30)
    assert seen == sorted(seen)
    assert processes.status()["ranks"][0]["restarts"] == 1


def test_sigterm_ends_cleanly_and_leaves_no_socket(processes, tmp_path):
    service = processes.service()
    service.send_signal(signal.SIGTERM)
    _, errors = service.communicate(timeout=30)
    assert service.returncode == 0
    assert "Traceback" not in errors
    assert not (tmp_path / "service.sock").exists()


def test_a_port_in_use_ends_the_second_service_with_one_error(processes):
    processes.service()
    processes.env["KV_CANARY_ENDPOINT"] += "2"
    second = processes.start("-c", SERVE)
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 1
    assert (
        f"port={processes.port}: 127.0.0.1:{processes.port} cannot be bound: Address already in use."
        in errors
    )
    assert "KV_CANARY_PORT" in errors
    assert processes.request("/healthz")
