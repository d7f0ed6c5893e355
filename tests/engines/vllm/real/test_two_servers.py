"""Two vLLM servers of one user on one host, started with default settings, and what a restart leaves behind.

Also run on a GPU (tests/gpu/README.md), where a start takes longer and vLLM watches what is compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from canary_obs.config import DEFAULT_PORT
from tests.engines.vllm.real.server import call, wait_until

pytestmark = pytest.mark.timeout(600)
URLS = [f"http://127.0.0.1:{DEFAULT_PORT + number}" for number in (0, 1)]
UNQUIET = re.compile(r"no word from the service|is degraded|is blind|JIT compilation.*(canary|_kernel)")
OWN_OF_VLLM = "_compute_slot_mapping_kernel"  # compiled during inference by a vLLM without a canary, too
START_WITHIN = 3.0  # seconds of processor time until a service answers: other tests may hold the cores
OK_WITHIN = 20.0  # seconds from the start of an engine's checks; 1 on a quiet machine


class Engine:
    """A vLLM in a process of its own, whose rank 0 starts the service."""

    def __init__(self, folder: Path, name: str) -> None:
        self.log = folder / f"{name}.log"
        settings = {"XDG_RUNTIME_DIR": str(folder), "KV_CANARY_MODE": "log", "KV_CANARY_SERVE": "auto"}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KV_CANARY_")}
        # What a test prints must not depend on the level that the other tests of this folder choose.
        kept |= {"VLLM_LOGGING_LEVEL": "INFO"} | settings
        command = [sys.executable, "-m", "tests.engines.vllm.real.engine_process"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
            )
        self.ready: float | None = None  # time.monotonic() when its checks began
        self._watch = threading.Thread(target=self._wait_for_ready, daemon=True)
        self._watch.start()

    def _wait_for_ready(self) -> None:
        while self.process.poll() is None and self.ready is None:
            if "canary ready" in self.text():
                self.ready = time.monotonic()
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_it_says(self, word: str) -> None:
        """Lines that vLLM prints are passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.decode().strip() == word:
                return
        raise AssertionError(self.text()[-4000:])

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        self.wait_until_it_says("answered")

    def services(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "serve" in child.cmdline():
                    found.append(child)
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass


def ranks(url: str) -> list[Any]:
    try:
        found: list[Any] = call(f"{url}/canary/status", timeout=2.0)[1]["ranks"]
    except (OSError, TypeError, KeyError):
        return []
    return found


def rank_of(url: str, engine: Engine) -> Any:
    """The rank of this engine that the service at `url` reports as `ok`, or None."""
    for rank in ranks(url):
        if rank["identity"]["pid"] == engine.process.pid and rank["state"] == "ok":
            return rank
    return None


def answers(url: str) -> bool:
    try:
        return call(f"{url}/canary/status", timeout=2.0)[0] == 200
    except OSError:
        return False


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def unquiet(engine: Engine) -> list[str]:
    lines = engine.text().splitlines()
    return [line for line in lines if UNQUIET.search(line) and OWN_OF_VLLM not in line]


def test_two_servers_with_defaults_and_a_restart_of_each_part(tmp_path: Path) -> None:
    assert all(is_free(DEFAULT_PORT + number) for number in (0, 1)), (
        "another service is running on this machine"
    )
    engines = [Engine(tmp_path, "first")]
    try:
        first = engines[0]
        wait_until(lambda: answers(URLS[0]), 240.0)
        (service,) = first.services()
        answered, used = time.time() - service.create_time(), service.cpu_times()
        wait_until(lambda: rank_of(URLS[0], first), 240.0)
        assert first.ready is not None
        waited = time.monotonic() - first.ready
        engines.append(Engine(tmp_path, "second"))
        second = engines[1]
        for engine in engines:
            engine.wait_until_it_says("ready")
            engine.ask()
        assert wait_until(lambda: rank_of(URLS[0], first))["identity"]["instance"] == "default"
        assert wait_until(lambda: rank_of(URLS[1], second))["identity"]["instance"] == "default-2"
        assert [len(ranks(url)) for url in URLS] == [1, 1]
        assert "another server of this user runs on this host" in second.text()
        spent = used.user + used.system
        assert spent < START_WITHIN, f"{spent:.1f} s of processor time until the service answered"
        assert waited < OK_WITHIN, f"`ok` was reported {waited:.1f} s after the checks had begun"

        # The first engine is killed and started again at once; its service ends with it.
        (orphan,) = first.services()
        first.process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        engines.append(Engine(tmp_path, "again"))
        again = engines[2]
        wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, 20.0)
        ended = time.monotonic() - killed
        again.wait_until_it_says("ready")
        again.ask()
        assert wait_until(lambda: rank_of(URLS[0], again))["identity"]["instance"] == "default"
        assert rank_of(URLS[1], second), "the other server notices nothing"

        # Its service is killed: rank 0 starts another.
        (service,) = again.services()
        service.send_signal(signal.SIGKILL)
        wait_until(lambda: [each.pid for each in again.services()] not in ([], [service.pid]), 30.0)
        again.ask()
        wait_until(lambda: rank_of(URLS[0], again))
        assert "restart 1 in 1 s" in again.text()
        print(f"seconds: service {spent:.2f} and {answered:.2f}, ok {waited:.2f}, service ends {ended:.2f}")
        assert [line for engine in engines[:2] for line in unquiet(engine)] == []
    finally:
        for engine in engines:
            engine.end()
