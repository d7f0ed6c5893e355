"""An installation with dcgm-exporter: its pages join our labels and feed the rules and boards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import pynvml
import pytest

from alerts.render import RULES
from canary_obs.config import ServiceConfig, load
from canary_obs.devices.identity import GpuIdentity
from canary_obs.serve import ServiceThread
from tests.devices.fake_nvml import FakeDriver, FakeGpu
from tests.ops.dcgm_page import NAMINGS, Exporter, Gpu, Naming, page
from tests.ops.joins import JOINED, Ask, prometheus_of
from tests.service.fakes import hello, identity

pytestmark = pytest.mark.ops

HEALTHY = Gpu(uuid="GPU-healthy", bus="00000000:10:00.0")
FAILING = Gpu(
    uuid="GPU-failing", bus="00000000:11:00.0",
    values={
        "xid": 63, "sbe_volatile": 41, "dbe_volatile": 3, "sbe_aggregate": 90, "dbe_aggregate": 5,
        "sram_exceeded": 1, "remapped_uncorrectable": 8, "remapped_correctable": 2, "remap_pending": 1,
        "remap_failed": 1, "recovery_action": 4, "clock_reasons": 0x4 | 0x40,
    },
)  # fmt: skip
_ECC_OFF = dict.fromkeys(("sbe_volatile", "dbe_volatile", "sbe_aggregate", "dbe_aggregate", "sram_exceeded"))
BLANK = Gpu(uuid="GPU-ecc-off", bus="00000000:12:00.0", values=_ECC_OFF)
# Both instances of a card repeat what the card says.
_CARD = {"xid": 31.0, "dbe_volatile": 1.0, "remapped_uncorrectable": 2.0, "clock_reasons": float(0x4 | 0x20)}
MIG = [
    Gpu(uuid="GPU-mig", bus="00000000:13:00.0", profile="1g.18gb", instance=number, values=_CARD)
    for number in ("3", "5")
]
GPUS = [HEALTHY, FAILING, BLANK, *MIG]
UUIDS = {gpu.uuid for gpu in GPUS}
# What the rules record of that page: the labels of each series but the UUID or count, and its value.
RECORDED = {
    "gpu:kv_canary_device_xid_events:sum": {("GPU-failing", "63"): 1, ("GPU-mig", "31"): 1},
    "gpu:kv_canary_device_uncorrectable:sum": {
        ("GPU-failing", "volatile"): 3, ("GPU-failing", "aggregate"): 5, ("GPU-mig", "volatile"): 1,
    },
    "gpu:kv_canary_device_remapped_rows:max": {
        ("GPU-failing", "uncorrectable"): 8, ("GPU-failing", "correctable"): 2,
        ("GPU-mig", "uncorrectable"): 2,
    },
    "gpu:kv_canary_device_remap_pending:max": {("GPU-failing",): 1},
    "gpu:kv_canary_device_remap_failed:max": {("GPU-failing",): 1},
    "gpu:kv_canary_device_sram_threshold_exceeded:max": {("GPU-failing",): 1},
    "gpu:kv_canary_device_recovery:group": {("GPU-failing", "drain_and_reset"): 1},
    "gpu:kv_canary_device_throttled:count": {("sw_power_cap",): 2, ("hw_thermal",): 1, ("sw_thermal",): 1},
    "gpu:kv_canary_device_xids:group": {("GPU-failing",): 1},
    "gpu:kv_canary_device_remaps:group": {("GPU-failing",): 1},
}  # fmt: skip


def recorded(ask: Ask, name: str) -> dict[tuple[str, ...], float]:
    """A recorded family, by the values of its labels."""
    labels = ("gpu_uuid", "counter", "error", "xid", "action", "reason")
    return {tuple(row[label] for label in labels if label in row): float(row["value"]) for row in ask(name)}


@contextmanager
def service_of(folder: Path, driver: FakeDriver) -> Iterator[ServiceThread]:
    """A service as its environment sets it, with a rank on each GPU."""
    with driver.installed():
        built = ServiceThread(
            msgspec.structs.replace(load(ServiceConfig), endpoint=f"ipc://{folder}/canary.sock", port=0)
        )
        try:
            for rank, gpu in enumerate({gpu.uuid: gpu for gpu in GPUS}.values()):
                own = GpuIdentity(
                    gpu_uuid=gpu.uuid, pci_bus_id=gpu.bus, gpu_model=gpu.model, driver_version=gpu.driver
                )
                greeting = msgspec.structs.replace(hello(identity(rank)), gpu=own)
                built.hub.ingest(greeting, lambda command: None)
            yield built
        finally:
            built.close()


def wait_for(ask: Ask, expected: dict[str, dict[tuple[str, ...], float]]) -> None:
    deadline = time.monotonic() + 60
    while (found := {name: recorded(ask, name) for name in expected}) != expected:
        assert time.monotonic() < deadline, found
        Event().wait(0.5)


def quick_rules() -> str:
    text = (RULES / "fleet.yml").read_text()
    for interval in ("interval: 5m", "interval: 1m"):
        assert interval in text
        text = text.replace(interval, "interval: 1s")
    return text


@pytest.fixture(params=NAMINGS.values(), ids=NAMINGS)
def naming(request: pytest.FixtureRequest) -> Naming:
    return request.param


@pytest.fixture
def binary() -> str:
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is NOT INSTALLED: apt-get install prometheus")
    return found


def test_dcgm_alone_feeds_rules_and_boards(naming, binary, tmp_path, monkeypatch):
    """With the setting `dcgm` no driver is asked, and there is no kv_canary_device_* to be counted twice."""
    monkeypatch.setenv("KV_CANARY_DEVICE_HEALTH", "dcgm")
    driver = FakeDriver([FakeGpu(gpu.uuid, gpu.bus) for gpu in GPUS])
    exporter = Exporter(page(naming, GPUS, "n1"))
    try:
        with (
            service_of(tmp_path, driver) as service,
            prometheus_of(binary, tmp_path, [service.port, exporter.port], rules=quick_rules()) as ask,
        ):
            assert {row["gpu_uuid"] for row in ask(JOINED)} == UUIDS
            wait_for(ask, RECORDED)
            assert ask('{__name__=~"kv_canary_device_.*"}') == []
            dcgm = ask('count by (UUID) ({__name__=~"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"})')
            assert {row["UUID"]: row["value"] for row in dcgm} == {
                "GPU-healthy": "1", "GPU-failing": "1", "GPU-mig": "2",
            }, "a blank value has no line, an instance has one of its own"  # fmt: skip
    finally:
        exporter.close()
    assert driver.calls == []


def test_both_sources_at_once_count_once(binary, tmp_path, monkeypatch):
    """The setting left at `nvml` although dcgm-exporter runs: no GPU is in a board or a rule twice."""
    monkeypatch.delenv("KV_CANARY_DEVICE_HEALTH", raising=False)
    driver = FakeDriver(
        [
            FakeGpu(
                FAILING.uuid, FAILING.bus,
                answers={"nvmlDeviceGetRemappedRows": (2, 8, 1, 1), "clocks": 0x4 | 0x40,
                         f"field {pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION}": 4},
            )
        ],
        events=[(0, 63)],
    )  # fmt: skip
    exporter = Exporter(page(NAMINGS["from_4_9"], GPUS, "n1"))
    try:
        with (
            service_of(tmp_path, driver) as service,
            prometheus_of(binary, tmp_path, [service.port, exporter.port], rules=quick_rules()) as ask,
        ):
            heard = 'max by (gpu_uuid) (kv_canary_device_xid_events_total{xid="63"})'
            wait_for(ask, {heard: {(FAILING.uuid,): 1}})
            (seen,) = ask("vector(time())")
            later = f"group(timestamp(gpu:kv_canary_device_throttled:count) > {seen['value']} + 1)"
            wait_for(ask, {later: {(): 1}})
            assert {name: recorded(ask, name) for name in RECORDED} == RECORDED
    finally:
        exporter.close()
