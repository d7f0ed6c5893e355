"""Several engine processes, one GPU of which flips bits; a real Prometheus; the report names it.

A week is too long to wait for: an hour of the rules takes three seconds here, and nothing else is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from alerts.render import RULES
from canary_obs.config import ServiceConfig
from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.fleet.prometheus import PrometheusSource
from canary_obs.serve import ServiceThread
from tests.devices.fake_nvml import FakeDriver, FakeGpu
from tests.ops.dcgm_page import FROM_4_9, UP_TO_4_8, Exporter, Gpu, page
from tests.ops.tools import ROOT

HOUR = 3  # seconds
GPUS = [f"GPU-{number:08d}-aaaa-bbbb-cccc-dddddddddddd" for number in range(12)]
NODES = [GPUS[first : first + 3] for first in range(0, 12, 3)]
CULPRIT = GPUS[7]
FAILING = {"xid": 64.0, "remapped_uncorrectable": 8.0, "remap_failed": 1.0}
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
def service(tmp_path: Path) -> Iterator[ServiceThread]:
    gpus = [FakeGpu(uuid, f"00000000:{16 + i:02X}:00.0") for i, uuid in enumerate(GPUS)]
    with FakeDriver(gpus, events=[(GPUS.index(CULPRIT), 94)]).installed():
        built = ServiceThread(ServiceConfig(endpoint=f"ipc://{tmp_path}/canary.sock", port=0))
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
def prometheus(tmp_path: Path, service: ServiceThread, exporters: list[Exporter]) -> Iterator[str]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is NOT INSTALLED: apt-get install prometheus")
    port = free_port()
    (tmp_path / "fleet.yml").write_text(quick_rules())
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [fleet.yml]\nscrape_configs:\n"
        "- job_name: kv-canary\n  honor_labels: true\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{service.port}']}}]\n"
        "- job_name: dcgm-exporter\n"
        f"  static_configs: [{{targets: {[f'127.0.0.1:{exporter.port}' for exporter in exporters]}}}]\n"
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def report(url: str) -> dict[str, Any] | None:
    """What the command prints; None while Prometheus does not answer yet."""
    command = [sys.executable, "-m", "canary_obs", "fleet", "report", "--prometheus", url, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


@pytest.mark.ops
@pytest.mark.usefixtures("engines")
def test_the_report_names_the_gpu_that_flips_bits(prometheus: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        found = report(prometheus)
        suspects = [row for row in found["gpus"] if row["verdict"] == "suspect_gpu"] if found else []
        if suspects:
            break
        assert time.monotonic() < deadline, found
        Event().wait(1.0)
    (row,) = suspects
    print(json.dumps(row, indent=1))
    assert (row["gpu_uuid"], row["gpu_model"]) == (CULPRIT, "NVIDIA H200")
    assert row["observed"] >= 3
    assert row["expected"] < 0.1
    assert "its driver reported a memory Xid (48, 63 or 94)" in row["reasons"]
    assert "rows of its memory were remapped, or wait for it" in row["reasons"], "as dcgm-exporter says"
    assert row["score"] > 3
    # Whatever its release, an exporter's series have the identity that the rank has, address and all.
    joined = PrometheusSource(prometheus).query(
        "kv_canary_rank_info * on (gpu_uuid, pci_bus_id, gpu_model) group_left () "
        "label_replace(label_replace("
        '{__name__=~"DCGM_FI_DEV_ROW_REMAP_(FAILURE|FAILED)"} * 0 + 1,'
        ' "gpu_uuid", "$1", "UUID", "(.*)"), "gpu_model", "$1", "modelName", "(.*)")'
    )
    assert {labels["gpu_uuid"] for labels, _ in joined} == set(GPUS)
    assert found is not None
    assert [other["gpu_uuid"] for other in found["gpus"]] == [CULPRIT], "no peer has findings"
    assert found["releases"] == []
