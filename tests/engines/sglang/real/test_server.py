"""SGLang's HTTP server with two tensor-parallel schedulers, and the service in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.engines.sglang.real.server import start_sglang
from tests.engines.vllm.real.server import Process, call, wait_until

pytestmark = pytest.mark.timeout(600)  # the first test waits for the start, which has its own limit
_TOKENS = 100


class Server:
    """The engine, the service, and their addresses."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._web = folder, free_port()
        self._endpoint = f"ipc://{folder}/service.sock"
        self.canary = f"http://127.0.0.1:{self._web}"
        self.service = self.start_service()
        port = free_port()
        self.engine_url = f"http://127.0.0.1:{port}"
        canary = {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": self._endpoint}
        self.engine = start_sglang(model, folder, port, canary, tp_size=2)

    def start_service(self) -> Process:
        command = [
            sys.executable, "-m", "canary_obs", "serve", "--endpoint", self._endpoint,
            "--port", str(self._web),
        ]  # fmt: skip
        service = Process(command, {}, self._folder / "service.log")
        service.wait_for(f"{self.canary}/healthz")
        return service

    def stop(self) -> None:
        self.engine.stop()
        self.service.stop()

    def answers(self) -> bool:
        try:
            return call(f"{self.engine_url}/health", timeout=20.0)[0] == 200
        except OSError:
            return False

    def ranks(self) -> list[Any]:
        found: list[Any] = call(f"{self.canary}/canary/status")[1]["ranks"]
        return sorted(found, key=lambda rank: rank["identity"]["rank"])

    def states(self) -> list[str]:
        return [rank["state"] for rank in self.ranks()]

    def wait_for_ok(self) -> None:
        """Two ranks that wait for each other on shared cores take their time."""
        try:
            wait_until(lambda: self.states() == ["ok", "ok"], 240.0)
        except AssertionError as error:
            raise AssertionError([(rank["state"], rank["reasons"]) for rank in self.ranks()]) from error

    def ask(self, number: int) -> int:
        prompt = [10 + (number * 7 + place) % 900 for place in range(150)]
        sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return call(f"{self.engine_url}/generate", body)[0]

    def sweep(self) -> Any:
        status, found = call(f"{self.canary}/canary/sweep?wait=true", {})
        assert status == 200
        return found


@pytest.fixture(scope="module")
def server(models: Any) -> Iterator[Server]:
    """Started once for all tests of this module, which run in their order: the last one ends a scheduler."""
    # Unix socket paths are short: pytest's own folders may not be.
    with TemporaryDirectory(prefix="kvc") as folder:
        server = Server(Path(folder), models("llama"))
        try:
            # Two ranks that wait for each other on two cores: the first forward may take many seconds.
            wait_until(lambda: server.answers() or not server.engine.alive, 300.0)
            server.wait_for_ok()
            yield server
        finally:
            server.stop()


def test_a_sweep_reaches_every_rank_that_is_busy(server: Server) -> None:
    answers: list[int] = []
    clients = [
        threading.Thread(target=lambda number=number: answers.append(server.ask(number)))
        for number in range(4)
    ]
    before = [rank["snapshot"]["step"] for rank in server.ranks()]
    for client in clients:
        client.start()
    wait_until(
        lambda: all(
            rank["snapshot"]["step"] > then + 3 for rank, then in zip(server.ranks(), before, strict=True)
        )
    )
    found = server.sweep()
    for client in clients:
        client.join()
    assert found["status"] == "passed"
    assert sorted(rank["key"][2] for rank in found["ranks"]) == [0, 1]
    assert answers == [200] * 4
    assert server.states() == ["ok", "ok"]


def test_a_sweep_reaches_every_rank_that_is_idle(server: Server) -> None:
    assert server.ask(9) == 200
    found = server.sweep()
    assert found["status"] == "passed"
    assert sorted(rank["key"][2] for rank in found["ranks"]) == [0, 1]
    assert all(rank["progress"]["checked"] >= 128 for rank in found["ranks"])
    # A rank that lingered would hold up the other in its next broadcast.
    assert server.ask(10) == 200
    assert server.states() == ["ok", "ok"]


def test_every_rank_checks_every_token(server: Server) -> None:
    """Each holds half of the heads of all of them."""

    def checked() -> set[int]:
        groups = [rank["snapshot"]["groups"]["full"] for rank in server.ranks()]
        return {group["verified"]["tail"] for group in groups}

    assert [rank["hello"]["expected_ranks"] for rank in server.ranks()] == [[0, 1]] * 2
    wait_until(lambda: len(checked()) == 1 and checked() != {0})


def test_a_service_that_comes_back_hears_every_rank(server: Server) -> None:
    server.service.stop()
    assert server.ask(11) == 200
    server.service = server.start_service()
    server.wait_for_ok()
    assert server.sweep()["status"] == "passed"


def test_a_scheduler_that_was_killed_is_missed(server: Server) -> None:
    victim = server.ranks()[1]["identity"]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: server.ranks()[1]["state"] in ("blind", "off"))
    assert server.service.alive
