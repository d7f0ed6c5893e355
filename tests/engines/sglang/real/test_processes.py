"""SGLang's own processes: each scheduler reports to the service, protected or refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.engines.sglang.versions import VERSIONS
from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import Phase, State
from tests.engines.sglang.real.refused import assert_told, web_service
from tests.engines.sglang.real.server import ROOT, environment
from tests.engines.sglang.real.traffic import prompts
from tests.engines.vllm.real.server import wait_until

# Each start has its own limit, which also prints what the engine said. Its processes, which poll while they
# wait, have taken over 150 s on two cores that other work uses, too.
pytestmark = pytest.mark.timeout(900)
SECONDS = 400.0
CHECKS = 5_000
Start = Callable[..., Any]


@pytest.fixture
def start(models: Any, tmp_path: Path) -> Start:
    """An engine with these settings, while the body runs; yields where its answers will be."""

    @contextmanager
    def run(
        hub_folder: str, canary: dict[str, str], rounds: int, model: str = "llama", **settings: Any
    ) -> Iterator[Path]:
        result, log = tmp_path / "answers", Path(hub_folder) / "log"
        result.unlink(missing_ok=True)
        replicas = 1 if settings.get("enable_dp_attention") else settings.get("dp_size", 1)
        ranks = replicas * settings.get("pp_size", 1) * settings.get("tp_size", 1)
        variables = os.environ | environment(tmp_path, canary, ranks)
        command = [sys.executable, "-m", "tests.engines.sglang.real.engine_process"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(models(model)), str(result), str(rounds), json.dumps(settings)],
                cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                with suppress(AssertionError):  # the log says more
                    wait_until(lambda: result.exists() or process.poll() is not None, SECONDS)
                assert result.exists(), log.read_text(errors="replace")[-4000:]
                yield result
                process.communicate(b"\n", timeout=120)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its schedulers as well
                process.wait()

    return run


@contextmanager
def service() -> Iterator[tuple[Hub, str, dict[str, str]]]:
    """A hub behind a socket, the socket's folder, and the settings of those who report to it."""
    with TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{folder}/s.sock"
        hub = Hub(ServiceConfig(endpoint=endpoint))
        listener = ZmqListener(endpoint, hub)
        try:
            yield hub, folder, {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": endpoint}
        finally:
            listener.close()


def assert_protected(hub: Hub) -> None:
    """Soon: both ranks have said what they are, and each has checked much.

    The last snapshot with the checks of these answers may come after the answers.
    """
    with suppress(AssertionError):  # what follows says more
        wait_until(lambda: hub.verdict() == (State.OK, ()) and min(checked(hub)) > CHECKS)
    ranks = hub.ranks()
    assert [rank.identity.rank for rank in ranks] == [0, 1]
    assert min(checked(hub)) > CHECKS, checked(hub)
    for rank in ranks:
        assert rank.hello is not None
        assert (rank.identity.engine, rank.hello.engine_version) == ("sglang", VERSIONS[-1])
        assert rank.hello.expected_ranks == (0, 1)
    assert hub.verdict() == (State.OK, ())
    assert hub.violations() == []


def checked(hub: Hub) -> list[int]:
    """Tokens that each rank has read at the head of its forwards, by its last snapshot."""
    snapshots = [rank.snapshot for rank in hub.ranks()]
    return [snapshot.groups["full"].verified[Phase.HEAD] if snapshot else 0 for snapshot in snapshots]


def test_the_replicas_of_an_engine_are_protected_and_its_answers_stay(
    start: Start, make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        service() as (hub, folder, canary),
        start(folder, canary, 3, dp_size=2, disable_overlap_schedule=False) as result,
    ):
        answers = json.loads(result.read_text("utf-8"))
        assert_protected(hub)
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig(disable_overlap_schedule=False)
    alone = [plain.generate(prompts(12, seed, longest=280), 24) for seed in range(3)]
    assert answers == [answer for found in alone for answer in found.values()]


def test_tensor_ranks_with_the_hooks_of_gpus_are_protected(start: Start) -> None:
    overlap = {"tp_size": 2, "disable_overlap_schedule": False, "gpus_hooks": True}
    with service() as (hub, folder, canary), start(folder, canary, 1, **overlap):
        assert_protected(hub)


def test_ranks_whose_attention_is_parallel_over_data_are_protected(start: Start) -> None:
    """With the hooks of GPUs. Each has requests of its own."""
    over_data = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "gpus_hooks": True}
    with service() as (hub, folder, canary), start(folder, canary, 1, "latent", **over_data):
        assert_protected(hub)


def test_the_stages_of_a_pipeline_are_protected(start: Start) -> None:
    with service() as (hub, folder, canary), start(folder, canary, 1, pp_size=2):
        assert_protected(hub)


# Another plugin names its hook's type as text. SGLang then applies no hook at all to that method.
_OTHER_PLUGIN = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", print, "around")
"""


def test_a_hook_that_sglang_failed_to_apply(start: Start, tmp_path: Path) -> None:
    """Its registry fails in its own code; the engine serves, and log, API and metric say why it is blind."""
    named = "SGLang did not run the hook on Scheduler.__init__"
    (tmp_path / "other_plugin.py").write_text(_OTHER_PLUGIN, "utf-8")
    info = tmp_path / "other_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = other_plugin:register\n", "utf-8")
    with web_service() as (endpoint, address):
        folder = str(Path(endpoint.removeprefix("ipc://")).parent)
        canary = {"KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": endpoint}
        with start(folder, canary, 1, alone=True) as result:
            assert len(json.loads(result.read_text("utf-8"))) == 12
            log = (Path(folder) / "log").read_text("utf-8", "replace")
            assert "Failed to apply hooks to sglang.srt.managers.scheduler.Scheduler.__init__" in log
            assert f"this engine is not protected: {named}" in log
            assert_told(address, named)
