"""Several engine processes, one GPU of which flips bits; two real Prometheus; the reports name it.

One Prometheus has what drivers say from dcgm-exporter alone, the other from a service that asks the driver.
A week is too long to wait for: an hour of the rules takes three seconds here, and nothing else is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from msgspec.structs import replace

from alerts.render import RULES
from canary_obs.config import ServiceConfig, load
from canary_obs.serve import ServiceThread
from tests.devices.fake_nvml import FakeDriver, FakeGpu
from tests.ops.dcgm_page import FROM_4_9, UP_TO_4_8, Exporter, Gpu, page
from tests.ops.joins import JOINED, Ask, prometheus_of
from tests.ops.tools import ROOT

HOUR = 3  # seconds
GPUS = [f"GPU-{number:08d}-aaaa-bbbb-cccc-dddddddddddd" for number in range(12)]
NODES = [GPUS[first : first + 3] for first in range(0, 12, 3)]
CULPRIT = GPUS[7]
FAILING = {"xid": 63.0, "remapped_uncorrectable": 8.0, "remap_failed": 1.0}
REASONS = {
    "its driver reported a memory Xid (48, 63 or 94)", "rows of its memory were remapped, or wait for it",
}  # fmt: skip
_SECONDS = 200.0
_TIMES = {
    "167h59m": 168 * HOUR - 1, "5h59m": 6 * HOUR - 1, "offset 7d": 168 * HOUR, "[3h]": 3 * HOUR,
    "[6h]": 6 * HOUR, "offset 1h": HOUR, "offset 6h": 6 * HOUR, "[1h]": HOUR, ":6h]": 6 * HOUR,
    ":1h]": HOUR, "[10m]": 2, "interval: 5m": 1, "interval: 1m": 1,
}  # fmt: skip


def quick_rules() -> str:
    """The rules with hours of three seconds."""
    text = (RULES / "fleet.yml").read_text()
    for name, seconds in _TIMES.items():
        assert name in text, name
        digits = "".join(char for char in name.split()[-1].strip("[]:") if char.isalnum())
        text = text.replace(name, name.replace(digits, f"{seconds}s"))
    return text


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    """The service of all engines; it asks no driver."""
    monkeypatch.setenv("KV_CANARY_DEVICE_HEALTH", "dcgm")
    with running(f"ipc://{tmp_path}/canary.sock") as built:
        yield built


@pytest.fixture
def sampling(
    tmp_path: Path, service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceThread]:
    """Another service, without engines, which samples the same GPUs; their driver tells of one."""
    monkeypatch.setenv("KV_CANARY_DEVICE_HEALTH", "nvml")
    gpus = [FakeGpu(uuid, f"00000000:{16 + i:02X}:00.0") for i, uuid in enumerate(GPUS)]
    gpus[GPUS.index(CULPRIT)].answers["nvmlDeviceGetRemappedRows"] = (0, 8, 1, 0)
    driver = FakeDriver(gpus, events=[(GPUS.index(CULPRIT), 94)])
    with driver.installed(), running(f"ipc://{tmp_path}/sampling.sock") as built:
        yield built


@contextmanager
def running(endpoint: str) -> Iterator[ServiceThread]:
    """A service as its environment sets it."""
    built = ServiceThread(replace(load(ServiceConfig), endpoint=endpoint, port=0))
    try:
        yield built
    finally:
        built.close()


@pytest.fixture
def engines(service: ServiceThread) -> Iterator[None]:
    started = []
    for node in range(4):
        own = NODES[node]
        command = [
            sys.executable,
            "-m",
            "tests.fleet.engine_process",
            service.config.endpoint,
            f"i{node}",
            *own,
        ]
        command += ["--flip", CULPRIT] if CULPRIT in own else []
        started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        for process in started:
            process.communicate(timeout=60)


@pytest.fixture
def exporters() -> Iterator[list[Exporter]]:
    """dcgm-exporter on every node, an older one on the first two."""
    started = []
    for node, uuids in enumerate(NODES):
        # Each engine process numbers its own GPUs from the first bus on.
        gpus = [
            Gpu(uuid=uuid, bus=f"00000000:{16 + number:02X}:00.0", values=FAILING if uuid == CULPRIT else {})
            for number, uuid in enumerate(uuids)
        ]
        started.append(Exporter(page(UP_TO_4_8 if node < 2 else FROM_4_9, gpus, f"n{node}")))
    yield started
    for exporter in started:
        exporter.close()


@pytest.fixture
def binary() -> str:
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is NOT INSTALLED: apt-get install prometheus")
    return found


def report(url: str) -> dict[str, Any] | None:
    """What the command prints; None while Prometheus does not answer yet."""
    command = [sys.executable, "-m", "canary_obs", "fleet", "report", "--prometheus", url, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def named(ask: Ask) -> dict[str, Any]:
    """The report as soon as it suspects a GPU for every reason there is, and the alert fires."""
    deadline = time.monotonic() + _SECONDS
    while True:
        found = report(ask.url)
        suspects = [row for row in found["gpus"] if row["verdict"] == "suspect_gpu"] if found else []
        alerts = ask('group by (gpu_uuid) (ALERTS{alertname="KVCanarySuspectGPU"})')
        if found and suspects and alerts and set(suspects[0]["reasons"]) >= REASONS:
            assert [alert["gpu_uuid"] for alert in alerts] == [suspects[0]["gpu_uuid"]]
            return found
        assert time.monotonic() < deadline, found
        Event().wait(1.0)


@pytest.mark.ops
@pytest.mark.usefixtures("engines")
def test_the_reports_name_the_gpu_that_flips_bits(
    binary: str, tmp_path: Path, service: ServiceThread, sampling: ServiceThread, exporters: list[Exporter]
) -> None:
    sources = {"dcgm": [exporter.port for exporter in exporters], "nvml": [sampling.port]}
    with ExitStack() as opened:
        asks = {}
        for name, ports in sources.items():
            (tmp_path / name).mkdir()
            live = prometheus_of(binary, tmp_path / name, [service.port, *ports], rules=quick_rules())
            asks[name] = opened.enter_context(live)
        for name, ask in asks.items():
            found = named(ask)
            (row,) = (row for row in found["gpus"] if row["verdict"] == "suspect_gpu")
            print(name, json.dumps(row, indent=1))
            assert (row["gpu_uuid"], row["gpu_model"]) == (CULPRIT, "NVIDIA H200")
            assert row["observed"] >= 3
            assert row["expected"] < 0.1
            assert row["score"] > 3
            assert [other["gpu_uuid"] for other in found["gpus"]] == [CULPRIT], "no peer has findings"
            assert found["releases"] == []
        assert {labels["gpu_uuid"] for labels in asks["dcgm"](JOINED)} == set(GPUS)
        assert asks["dcgm"]('{__name__=~"kv_canary_device_.*"}') == [], "dcgm-exporter has it"
        assert asks["nvml"]('{__name__=~"DCGM_.*"}') == []
        sampled = asks["nvml"]("kv_canary_rank_info * on (gpu_uuid) group_left () kv_canary_device_info")
        assert {labels["gpu_uuid"] for labels in sampled} == set(GPUS)
