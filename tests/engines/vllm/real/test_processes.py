"""Engine core and workers in processes of their own: no server, pipeline stages, tensor parallel ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.engines.vllm.worker import runtime_of
from canary_obs.hub.hub import Hub
from canary_obs.hub.rank_table import MISSING_SECONDS
from canary_obs.records import EngineMessage, Goodbye
from canary_obs.transport.listener import ZmqListener
from canary_obs.transport.sink import Reply
from canary_obs.vocabulary import State
from tests.engines.vllm.real.prefill import can_fork
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.server import Process, wait_until
from tests.unchecked import Report

# Each test starts several engines; each start has its own limit, which also prints what they said.
pytestmark = pytest.mark.timeout(900)
MINIMUM_CHECKS = 50_000
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "stages": {"pipeline_parallel_size": 2},
    "shards": {"tensor_parallel_size": 2},
}
INJECTED = {
    "KV_CANARY_PERTURB": "real_kv_used=1",
    "KV_CANARY_PERTURB_ENABLED": "true",
    "KV_CANARY_PERTURB_WARMUP": "3",
}
SECONDS = 280.0


class FirstRankAlone(Hub):
    """A hub; `alone` is the last verdict of one that hears the first rank only, some seconds later."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self._other = Hub(config)
        self.alone: tuple[State, tuple[str, ...]] = (State.OFF, ())

    def ingest(self, message: EngineMessage, reply: Reply) -> None:
        super().ingest(message, reply)
        if message.identity.rank == 0 and not isinstance(message, Goodbye):
            self._other.ingest(message, lambda _: None)
            self.alone = self._other.verdict(time.monotonic() + MISSING_SECONDS - 0.1)
            if self.alone[0] is State.OK:  # its ranks may have a moment to attach
                self.alone = self._other.verdict(time.monotonic() + MISSING_SECONDS + 0.1)


def start(model: Path, result: Path, engine: dict[str, Any], canary: dict[str, str]) -> Process:
    ranks = engine.get("pipeline_parallel_size", 1) * engine.get("tensor_parallel_size", 1)
    binding = "|".join(str(core % (os.cpu_count() or 1)) for core in range(ranks))
    environment = canary | ({"VLLM_CPU_OMP_THREADS_BIND": binding} if ranks > 1 else {})
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = [sys.executable, "-m", "tests.engines.vllm.real.answers"]
    command += [str(model), str(result), json.dumps(engine)]
    return Process(command, environment, result.with_suffix(".log"), forked=can_fork())


def answers(model: Path, result: Path, engine: dict[str, Any], canary: dict[str, str]) -> Any:
    process = start(model, result, engine, canary)
    try:
        assert process.wait(SECONDS) == 0, process.log.read_text()[-12000:]
    finally:
        process.stop()
    return json.loads(result.read_text())


def alone(model: Path) -> list[list[list[int]]]:
    """What an unprotected rank in this process answers to what `answers` asks."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once per process, before another mode is set
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_CANARY_MODE", "none")
        rig = Rig(model)
        try:
            assert runtime_of(rig.worker) is None
            return [rig.generate(asked) for asked in (prompts(12), prompts(12)[::-1])]
        finally:
            rig.close()


@pytest.fixture(scope="module")
def unprotected(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("unprotected")
    known: dict[str, Any] = {}

    def of(case: str) -> Any:
        # Stages compute what one process computes, bit for bit; shards add up in another order.
        key = "shards" if case == "shards" else "one"
        if key not in known and key == "one":
            known[key] = alone(models("llama"))
        elif key not in known:
            known[key] = answers(models("llama"), folder / key, CASES[key], {"KV_CANARY_MODE": "none"})
        return known[key]

    return of


@pytest.mark.parametrize(
    "case",
    ["shards", "stages", pytest.param("one", marks=pytest.mark.nightly)],  # test_pod.py has one as well
)
def test_every_rank_is_protected_and_answers_stay(
    models: Any, tmp_path: Path, unprotected: Any, case: str, unchecked: Report
) -> None:
    engine = CASES[case]
    with TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        hub = FirstRankAlone(ServiceConfig(endpoint=endpoint))
        listener = ZmqListener(endpoint, hub)
        try:
            canary = {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": endpoint}
            found = answers(models("llama"), tmp_path / "answers", engine, canary)
        finally:
            listener.close()
    ranks = hub.ranks()
    assert [rank.identity.rank for rank in ranks] == list(range(2 if engine else 1))
    layers = 0
    for rank in ranks:
        assert rank.hello is not None
        assert rank.snapshot is not None
        assert (rank.snapshot.state, rank.snapshot.state_reasons) == (State.OK, ())
        assert sum(rank.snapshot.groups["full"].verified.values()) > MINIMUM_CHECKS
        layers += rank.hello.groups[0].layers
        assert rank.hello.expected_ranks == tuple(range(len(ranks)))
    assert layers == (6 if case == "shards" else 3)
    assert hub.violations() == []
    if engine:
        report = "a rank of the engine that the service never heard"
        unchecked(report, "vLLM V1", hub.alone, names="no word of ranks 1", seconds=MISSING_SECONDS + 0.1)
    assert found == unprotected(case)


def test_raise_ends_engine_and_workers_with_the_evidence(models: Any, tmp_path: Path) -> None:
    canary = {"KV_CANARY_MODE": "raise", "KV_CANARY_ENDPOINT": "inproc", **INJECTED}
    process = start(models("llama"), tmp_path / "answers", CASES["shards"], canary)
    try:
        status = process.wait(SECONDS)
        said = process.log.read_text()
        wait_until(lambda: not process.session())
    finally:
        process.stop()
    assert status != 0
    assert not (tmp_path / "answers").exists()
    assert "KVCacheViolation: KV cache violation: reason=kv_data, phase=tail, group=full" in said
    assert "EngineDeadError" in said
