"""What a driver says of its GPUs becomes series; what it does not say stays absent, and is never an error."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from canary_obs.config import ServiceConfig
from canary_obs.devices import sampler as sampler_module
from canary_obs.devices.health import RECOVERY_ACTIONS, DeviceHealth, xid_label
from canary_obs.devices.identity import node_name
from canary_obs.devices.nvml import library
from canary_obs.devices.nvml_health import NvmlHealth
from canary_obs.devices.sampler import KEPT_SECONDS, DeviceSampler
from canary_obs.hub.hub import Hub
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from tests.devices.fake_nvml import FakeDriver, FakeGpu, Refused

UUID, BUS = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "00000000:1B:00.0"
_VOLATILE, _AGGREGATE = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
_CORRECTED, _UNCORRECTED = (
    pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
)
_RECOVERY = f"field {pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION}"
_IDENTITY = (UUID, BUS, "NVIDIA H200", "580.95.05")
# As an H200 with driver 580 answers that has a row to remap at its next reset.
R580: dict[str, Any] = {
    "nvmlDeviceGetTotalEccErrors": {
        (_VOLATILE, _CORRECTED): 3, (_VOLATILE, _UNCORRECTED): 1,
        (_AGGREGATE, _CORRECTED): 12, (_AGGREGATE, _UNCORRECTED): 2,
    },
    "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
    "nvmlDeviceGetSramEccErrorStatus": 1,
    "clocks": pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle,
    _RECOVERY: pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET,
}  # fmt: skip
# A T4 with driver 470: no row remapper, no SRAM status, no recovery action, the older name of clock reasons.
R470 = {name: R580[name] for name in ("nvmlDeviceGetTotalEccErrors", "clocks")}
R470_LACKS = frozenset({"nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetCurrentClocksEventReasons"})
# An A100 with driver 535: rows are remapped, clock reasons have their new name; it knows no recovery action.
R535 = {name: R580[name] for name in (*R470, "nvmlDeviceGetRemappedRows")}
R535 |= {_RECOVERY: Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)}
R535_LACKS = frozenset({"nvmlDeviceGetSramEccErrorStatus"})


def health_of(driver: FakeDriver) -> DeviceHealth:
    with driver.installed(), library() as nvml:
        (found,) = NvmlHealth(nvml).sample(lambda: 5.0)
    return found


def series(devices: tuple[DeviceHealth, ...]) -> dict[tuple[str, ...], float]:
    exposition = Exposition(HubCollector(Hub(ServiceConfig()), devices=lambda: devices))
    return {
        (sample.name.removeprefix("kv_canary_device_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(exposition.page("")[0].decode())
        for sample in family.samples
        if sample.name.startswith("kv_canary_device_")
    }


def test_every_value_of_a_present_driver_is_a_series(monkeypatch):
    monkeypatch.setenv("NODE_NAME", "n1")
    found = series((health_of(FakeDriver([FakeGpu(UUID, BUS, answers=R580)])),))
    assert found["info", *sorted((UUID, "n1", BUS, "NVIDIA H200", "580.95.05"))] == 1
    assert found["sampled_timestamp_seconds", UUID] == 5
    assert found["ecc_errors_total", UUID, "uncorrectable", "volatile"] == 1
    assert found["ecc_errors_total", UUID, "aggregate", "correctable"] == 12
    assert found["remapped_rows_total", UUID, "correctable"] == 1
    assert found["remapped_rows_total", UUID, "uncorrectable"] == 2
    assert (found["remap_pending", UUID], found["remap_failed", UUID]) == (1, 0)
    assert found["sram_threshold_exceeded", UUID] == 1
    actions = {key[2]: value for key, value in found.items() if key[0] == "recovery_action"}
    assert actions["drain_and_reset"] == 1
    assert sum(actions.values()) == 1
    throttles = {key[-1] for key, value in found.items() if key[0] == "throttled" and value}
    assert throttles == {"sw_power_cap"}, "an idle GPU is not throttled"
    assert found["xid_events_total", "48", UUID] == 0, "increase() misses a series that begins at 1"


@pytest.mark.parametrize("refusal", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, 999])
def test_what_a_driver_refuses_is_absent_and_the_rest_is_there(refusal):
    for name in R580:
        gpu = FakeGpu(UUID, BUS, answers=R580 | {name: Refused(refusal)})
        full, without = (
            series((health_of(FakeDriver([FakeGpu(UUID, BUS, answers=R580)])),)),
            series((health_of(FakeDriver([gpu])),)),
        )
        assert without.items() < full.items(), name


def test_an_older_generation_says_less():
    driver = FakeDriver([FakeGpu(UUID, BUS, "Tesla T4", answers=R470)], version="470.57.02", lacks=R470_LACKS)
    found = health_of(driver)
    assert found.ecc_errors["volatile", "uncorrectable"] == 1
    assert found.throttles["sw_power_cap"]
    assert (found.remapped_rows, found.remap_pending, found.recovery_action) == ({}, None, None)
    assert found.sram_threshold_exceeded is None


def test_a_generation_between_says_all_but_the_newest():
    gpu = FakeGpu(UUID, BUS, "NVIDIA A100-SXM4-80GB", answers=R535)
    found = health_of(FakeDriver([gpu], version="535.183.01", lacks=R535_LACKS))
    assert found.identity.driver_version == "535.183.01"
    assert (found.remapped_rows, found.remap_pending) == ({"correctable": 1, "uncorrectable": 2}, True)
    assert found.throttles["sw_power_cap"]
    assert (found.sram_threshold_exceeded, found.recovery_action) == (None, None)


def test_a_card_in_mig_mode_is_sampled_once_as_the_whole_card():
    instances = {"MIG-deadbeef-0000-5e5e-9d9d-000000000001": 3, "MIG-deadbeef-0000-5e5e-9d9d-000000000002": 5}
    found = series((health_of(FakeDriver([FakeGpu(UUID, BUS, answers=R580, mig=instances)])),))
    assert {key for key in found if key[0] == "info"} == {("info", *sorted((*_IDENTITY, node_name())))}
    assert found["ecc_errors_total", UUID, "aggregate", "uncorrectable"] == 2


def test_recovery_actions_are_numbered_as_nvml_numbers_them():
    for number, name in enumerate(RECOVERY_ACTIONS):
        assert getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{name.upper()}") == number
    found = health_of(FakeDriver([FakeGpu(UUID, BUS, answers={_RECOVERY: 99})]))
    assert found.recovery_action == "other"


def test_xids_are_counted_for_their_gpu():
    other = FakeGpu("GPU-b", "00000000:43:00.0")
    driver = FakeDriver([FakeGpu(UUID, BUS), other], events=[(1, 94), (1, 94), (0, 31), (-1, 15)])
    with driver.installed(), library() as nvml:
        health = NvmlHealth(nvml)
        while driver.events:
            assert health.wait(0.01), "a GPU that is lost does not end the listening to others"
        first, second = health.sample()
        health.close()
    assert (first.xids, second.xids) != (None, None)
    assert first.xids is not None
    assert second.xids is not None
    assert (first.xids["other"], first.xids["94"], second.xids["94"]) == (1, 0, 2)
    assert xid_label(94) == "94"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_without_permission_xids_are_absent(code):
    with FakeDriver([FakeGpu(UUID, BUS, answers=R580)], registers=code).installed(), library() as nvml:
        health = NvmlHealth(nvml)
        assert not health.wait(0.0)
        (found,) = health.sample()
    assert found.xids is None
    assert found.ecc_errors


def test_a_gpu_that_fell_off_the_bus_is_left_out():
    lost = FakeGpu("GPU-b", "00000000:43:00.0")
    driver = FakeDriver([FakeGpu(UUID, BUS), lost])
    with driver.installed(), library() as nvml:
        health = NvmlHealth(nvml)
        assert len(health.sample()) == 2
        lost.answers["nvmlDeviceGetUUID"] = Refused(pynvml.NVML_ERROR_GPU_IS_LOST)
        assert [found.identity.gpu_uuid for found in health.sample()] == [UUID]


def test_the_sampler_samples_until_it_is_closed_and_forgets_what_is_old():
    now = [100.0]
    driver = FakeDriver([FakeGpu(UUID, BUS, answers=R580)])
    faults: list[Exception] = []
    with driver.installed():
        sampler = DeviceSampler(faults.append, interval=0.01, wall=lambda: now[0])
        assert sampler.sampled.wait(10)
        assert [health.identity.gpu_uuid for health in sampler.latest()] == [UUID]
        sampler.close()
    assert (faults, driver.initialised) == ([], 0)
    now[0] += KEPT_SECONDS
    assert sampler.latest() == (), "a driver that hangs says nothing about now"


def test_a_service_without_nvml_has_no_device_series_and_no_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    faults: list[Exception] = []
    sampler = DeviceSampler(faults.append)
    sampler.close()
    assert (sampler.latest(), faults, series(sampler.latest())) == ((), [], {})


def test_a_fault_of_the_sampler_is_reported(monkeypatch):
    reported = threading.Event()
    monkeypatch.setattr(sampler_module, "NvmlHealth", lambda nvml: 1 / 0)
    with FakeDriver([]).installed():
        sampler = DeviceSampler(lambda error: reported.set())
        assert reported.wait(10)
        sampler.close()
