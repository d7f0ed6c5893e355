"""Identity and health of every GPU of this host, printed, and compared with what nvidia-smi says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from canary_obs.devices.nvml import library
from canary_obs.devices.nvml_health import NvmlHealth
from canary_obs.runtime.device.gpu_identity import read_identity
from tests.gpu.rig import make_rig

pytestmark = pytest.mark.gpu
pytest.importorskip("pynvml")


def smi(query: str, fields: str) -> list[list[str]]:
    """Rows of nvidia-smi's answer, a field each."""
    command = ["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [[part.strip() for part in line.split(",")] for line in lines.splitlines()]


def number(text: str) -> int | None:
    """None for [N/A] and [Not Supported]."""
    return int(text) if text.isdecimal() else None


def test_each_torch_device_is_the_gpu_that_nvidia_smi_names() -> None:
    listed = {row[0]: row for row in smi("gpu", "uuid,pci.bus_id,name,driver_version")}
    found = []
    for index in range(torch.cuda.device_count()):
        started = time.perf_counter()
        identity = read_identity(torch.device("cuda", index))
        print(f"cuda:{index}: {identity}, read in {1e3 * (time.perf_counter() - started):.1f} ms")
        assert identity is not None
        properties = torch.cuda.get_device_properties(index)
        uuid, bus, name, driver = listed[identity.gpu_uuid]
        assert uuid == f"GPU-{properties.uuid}" or identity.gpu_instance, (
            "MIG devices have UUIDs of their own"
        )
        assert (identity.pci_bus_id, identity.gpu_model, identity.driver_version) == (bus, name, driver)
        found.append((identity.gpu_uuid, identity.gpu_instance))
    assert len(set(found)) == len(found)


def test_a_renumbered_process_finds_its_own_gpu() -> None:
    """CUDA_VISIBLE_DEVICES by UUID, the last GPU first: cuda:0 is another one than the driver's number 0."""
    uuids = [row[0] for row in smi("gpu", "uuid")][::-1]
    code = (
        "import torch; from canary_obs.runtime.device.gpu_identity import read_identity as r\n"
        "print(*(r(torch.device('cuda', i)).gpu_uuid for i in range(torch.cuda.device_count())))"
    )
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == uuids


def test_health_is_what_nvidia_smi_says() -> None:
    ecc = "ecc.errors.{}.{}.total"
    counters = ("volatile", "aggregate")
    names = [ecc.format(error, kind) for kind in counters for error in ("corrected", "uncorrected")]
    expected = {row[0]: [number(text) for text in row[1:]] for row in smi("gpu", ",".join(["uuid", *names]))}
    rows = {
        row[0]: row[1:]
        for row in smi(
            "remapped-rows",
            "gpu_uuid,remapped_rows.correctable,remapped_rows.uncorrectable,remapped_rows.pending,"
            "remapped_rows.failure",
        )
    }
    with library() as nvml:
        health = NvmlHealth(nvml)
        started = time.perf_counter()
        samples = health.sample()
        print(f"{len(samples)} GPUs sampled in {1e3 * (time.perf_counter() - started):.1f} ms")
        heard = health.wait(0.2)
        health.close()
    assert {sample.identity.gpu_uuid for sample in samples} == expected.keys()
    for sample in samples:
        print(sample)
        kinds = [(kind, error) for kind in counters for error in ("correctable", "uncorrectable")]
        assert [sample.ecc_errors.get(key) for key in kinds] == expected[sample.identity.gpu_uuid]
        said = rows.get(sample.identity.gpu_uuid)
        if said is not None and number(said[0]) is not None:
            assert sample.remapped_rows == {"correctable": int(said[0]), "uncorrectable": int(said[1])}
            states = [text in ("1", "Yes") for text in said[2:]]
            assert [sample.remap_pending, sample.remap_failed] == states
        assert sample.throttles, "every driver that torch runs on has clock reasons"
        assert (sample.xids is not None) is heard


def test_a_driver_is_asked_at_attach_and_never_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    @contextmanager
    def counted() -> Iterator[Any]:
        asked.append(1)
        with library() as nvml:
            yield nvml

    monkeypatch.setattr("canary_obs.devices.nvml.library", counted)
    rig = make_rig()
    assert len(asked) == 1
    rig.run(200)
    assert len(asked) == 1
    assert rig.canary.overhead.keys()
    print(f"host seconds by hook over 200 steps: {dict(rig.canary.overhead)}")
    rig.canary.detach()
