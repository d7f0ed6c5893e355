"""A rank's labels name the GPU that its process sees, as dcgm-exporter spells it; else they are absent."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pynvml
import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.devices import amd, nvml
from canary_obs.devices.identity import GpuIdentity, bus_id, node_name
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import tiny
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.device import gpu_identity
from canary_obs.runtime.report import reporter
from tests.devices.fake_amdsmi import NO_PERM, FakeAmdSmi, FakeCard, Refused as AmdRefused, mi300x
from tests.devices.fake_nvml import FakeDriver, FakeGpu, Refused

FIRST = FakeGpu("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "00000000:1B:00.0")
SECOND = FakeGpu(
    "GPU-aaaaaaaa-0000-1111-2222-333333333333", "00000000:43:00.0", "NVIDIA H100 80GB HBM3",
    mig={"MIG-deadbeef-0000-5e5e-9d9d-000000000001": 3, "MIG-deadbeef-0000-5e5e-9d9d-000000000002": 5},
)  # fmt: skip


def seen(uuid: str, *, bus: int = 0x1B) -> Any:
    """Properties as torch has them of `cuda:0`, whatever the number of that GPU is for the driver."""
    return types.SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def read(monkeypatch: pytest.MonkeyPatch, properties: Any, driver: FakeDriver) -> GpuIdentity | None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with driver.installed():
        return gpu_identity.read_identity(torch.device("cuda:0"))


def test_the_process_sees_another_number_than_the_driver(monkeypatch):
    """CUDA_VISIBLE_DEVICES=1: cuda:0 is the driver's second GPU."""
    driver = FakeDriver([FIRST, SECOND])
    found = read(monkeypatch, seen("aaaaaaaa-0000-1111-2222-333333333333", bus=0x43), driver)
    assert found == GpuIdentity(
        gpu_uuid="GPU-aaaaaaaa-0000-1111-2222-333333333333", pci_bus_id="00000000:43:00.0",
        gpu_model="NVIDIA H100 80GB HBM3", driver_version="580.95.05",
    )  # fmt: skip
    assert driver.initialised == 0, "NVML is closed again"


def test_a_mig_device_is_its_card_and_the_number_of_its_instance(monkeypatch):
    found = read(monkeypatch, seen("deadbeef-0000-5e5e-9d9d-000000000002"), FakeDriver([FIRST, SECOND]))
    assert found is not None
    assert (found.gpu_uuid, found.gpu_instance) == (SECOND.uuid, "5")


def test_an_unknown_uuid_is_found_by_its_address(monkeypatch):
    """Drivers before R470 spell MIG devices otherwise, and torch before 2.6 knows no UUID."""
    for uuid in ("deadbeef-0000-0000-0000-00000000ffff", ""):
        found = read(monkeypatch, seen(uuid), FakeDriver([SECOND, FIRST]))
        assert found is not None
        assert (found.gpu_uuid, found.gpu_instance) == (FIRST.uuid, "")


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        (FakeDriver([FIRST], init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), False),
        (FakeDriver([FIRST], init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), False),
        (FakeDriver([FIRST], init=pynvml.NVML_ERROR_NO_PERMISSION), False),
        (FakeDriver([SECOND]), False),  # not among the GPUs that this container sees
        (FakeDriver([FakeGpu(FIRST.uuid, FIRST.bus, answers={"nvmlDeviceGetUUID": Refused(999)})]), False),
        (FakeDriver([FakeGpu(FIRST.uuid, FIRST.bus, answers={"nvmlDeviceGetName": Refused(4)})]), True),
        (FakeDriver([FIRST], version="470.57.02", lacks=frozenset({"nvmlDeviceGetPciInfo_v3"})), True),
    ],
)
def test_what_the_driver_does_not_say_is_absent_and_never_an_error(monkeypatch, driver, known):
    found = read(monkeypatch, seen(FIRST.uuid.removeprefix("GPU-")), driver)
    assert (found is not None) is known
    assert found is None or found.gpu_uuid == FIRST.uuid
    assert driver.initialised == 0


def test_a_missing_library_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen("x"))
    assert gpu_identity.read_identity(torch.device("cuda:0")) is None
    with pytest.raises(nvml.NoLibrary, match="nvidia-ml-py is not installed"), nvml.library():
        pass


def test_a_cpu_asks_nobody(monkeypatch):
    monkeypatch.setattr(gpu_identity, "_read", lambda device: pytest.fail("was asked"))
    assert gpu_identity.read_identity(torch.device("cpu")) is None


def test_a_driver_that_hangs_does_not_hold_up_the_start(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(gpu_identity, "_read", lambda device: answered.wait(4))
    try:
        assert gpu_identity.read_identity(torch.device("cuda:0"), 0.05) is None
    finally:
        answered.set()


def test_an_engine_asks_the_driver_at_attach_alone(monkeypatch):
    """Not in a step, not when the service asks who it is, not when it detaches."""
    driver = FakeDriver([FIRST])
    own = FIRST.uuid.removeprefix("GPU-")
    monkeypatch.setattr(reporter, "read_identity", lambda device: nvml.find_identity(own, ""))
    engine = Engine(tiny(seed=3))
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), seed=1)
    with driver.installed():
        canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, backend="torch"))
        assert canary is not None
        canary.mark_ready()
        asked = len(driver.calls)
        assert (asked > 0, driver.initialised) == (True, 0)
        while engine.statistics.steps < 30:
            traffic.advance(engine)
            engine.step()
        canary.reporter.send_hello()
        canary.detach()
    assert driver.calls[asked:] == []


def test_nodes_are_named_as_dcgm_exporter_names_them(monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu-node-17")
    assert node_name() == "gpu-node-17"
    monkeypatch.delenv("NODE_NAME")
    assert node_name()
    assert bus_id(0, 0x1B, 0) == "00000000:1B:00.0"
    assert bus_id(0x10000, 0xE1, 0x1F) == "00010000:E1:1F.0"


def test_an_amd_gpu_is_found_by_its_address():
    other = FakeCard(mi300x() | {"amdsmi_get_gpu_device_bdf": "0000:05:00.0"})
    own = FakeCard(mi300x() | {"amdsmi_get_gpu_driver_info": AmdRefused(NO_PERM)})
    with FakeAmdSmi([FakeCard({}), other, own]).installed() as driver:
        assert amd.find_identity("00000000:C6:00.0") == GpuIdentity(
            gpu_uuid="73ff74a1-0000-1000-8038-1b8d0e2f8a4c", pci_bus_id="00000000:C6:00.0",
            gpu_model="AMD Instinct MI300X",
        )  # fmt: skip
        assert amd.find_identity("00000000:FF:00.0") is None
        assert driver.initialised == 0


def test_without_amdsmi_an_amd_gpu_has_no_identity(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen("x"))
    assert gpu_identity.read_identity(torch.device("cuda:0")) is None
