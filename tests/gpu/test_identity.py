"""Identity and health of every GPU of this host, against what `nvidia-smi -q -x` says in the same test.

On a GPU host, from the repository's root, with msgspec and pyzmq installed or on PYTHONPATH:

    PYTHONPATH=$PWD:$PWD/kernels:$PYTHONPATH python3 -m pytest -s tests/gpu/test_identity.py

It takes about two minutes, and prints its figures. With PROMETHEUS=/path/to/prometheus (Debian's is
/usr/bin/prometheus: 48 MiB, needs glibc 2.34 alone) a real Prometheus joins the labels as well.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from canary_obs.config import ServiceConfig
from canary_obs.devices.health import RECOVERY_ACTIONS, THROTTLES, XIDS
from canary_obs.devices.identity import node_name
from canary_obs.hub.hub import Hub
from canary_obs.runtime.device.gpu_identity import read_identity
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.transport.links import LocalLink
from canary_obs.transport.listener import LocalListener
from tests.gpu import nvidia_smi
from tests.gpu.device_service import SECONDS, DeviceService
from tests.gpu.nvidia_smi import Said
from tests.gpu.rig import Rig, make_rig
from tests.ops.dcgm_page import NAMINGS, Exporter, Gpu, page
from tests.ops.joins import JOINED, joined_by_text, prometheus_of

pytestmark = pytest.mark.gpu
pynvml: Any = pytest.importorskip("pynvml")

WARM_UP, ROUNDS, STEPS = 300, 24, 50  # of each of two engines

Key = tuple[str, frozenset[str]]  # a series: its name, and the values of its labels but the UUID


def key(name: str, *values: str) -> Key:
    return name, frozenset(values)


def series_of(text: str, uuid: str) -> dict[Key, float]:
    """The kv_canary_device_* of one GPU."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kv_canary_device_") and sample.labels.get("gpu_uuid") == uuid:
                own = [value for label, value in sample.labels.items() if label != "gpu_uuid"]
                found[key(sample.name.removeprefix("kv_canary_device_"), *own)] = sample.value
    return found


def expected_of(said: Said) -> dict[Key, float | None]:
    """The same series but Xids and times, as nvidia-smi has them; None = it does not say."""
    flags = {
        "sram_threshold_exceeded": said.sram_exceeded, "remap_pending": said.remap_pending,
        "remap_failed": said.remap_failed,
    }  # fmt: skip
    action = said.recovery_action
    return {
        key("info", node_name(), said.bus, said.model, said.driver): 1.0,
        **{key("ecc_errors_total", counter, error): count for (counter, error), count in said.ecc.items()},
        **{key("remapped_rows_total", error): count for error, count in said.remapped.items()},
        **{key(name): value for name, value in flags.items()},
        **{
            key("recovery_action", name): None if action is None else float(name == action)
            for name in (*RECOVERY_ACTIONS, "other")
        },
        **{key("throttled", reason): active for reason, active in said.throttles.items()},
    }


@pytest.fixture(scope="module")
def service() -> Iterator[DeviceService]:
    with DeviceService() as started:
        yield started


def test_each_torch_device_is_the_gpu_that_nvidia_smi_names() -> None:
    listed = nvidia_smi.ask()
    found = []
    for index in range(torch.cuda.device_count()):
        started = time.perf_counter()
        identity = read_identity(torch.device("cuda", index))
        print(f"cuda:{index}: {identity}, read in {1e3 * (time.perf_counter() - started):.1f} ms")
        assert identity is not None
        said = listed[identity.gpu_uuid]
        own = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        assert said.uuid == own or identity.gpu_instance, "MIG devices have UUIDs of their own"
        assert (identity.pci_bus_id, identity.gpu_model, identity.driver_version) == (
            said.bus, said.model, said.driver,
        )  # fmt: skip
        found.append((identity.gpu_uuid, identity.gpu_instance))
    assert len(set(found)) == len(found)


def test_a_renumbered_process_finds_its_own_gpu() -> None:
    """CUDA_VISIBLE_DEVICES by UUID, the last GPU first: cuda:0 is another one than the driver's number 0."""
    uuids = list(nvidia_smi.ask())[::-1]
    code = (
        "import torch; from canary_obs.runtime.device.gpu_identity import read_identity as r\n"
        "print(*(r(torch.device('cuda', i)).gpu_uuid for i in range(torch.cuda.device_count())))"
    )
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == uuids


def test_every_device_series_is_what_nvidia_smi_says(service: DeviceService) -> None:
    """Asked before and after: a clock reason may change meanwhile. Xids: all counters are there, at 0."""
    before = nvidia_smi.ask()
    print(service.ask("on"))
    text = service.ask("page")
    service.ask("off")
    after = nvidia_smi.ask()
    assert before.keys() == after.keys()
    for uuid, first in before.items():
        found, now = series_of(text, uuid), time.time()
        earlier, later = expected_of(first), expected_of(after[uuid])
        print(f"{uuid}: {len(found)} series; nvidia-smi: {first}")
        for series, value in earlier.items():
            assert found.get(series) in (value, later[series]), series
        assert {key("throttled", reason) for reason in THROTTLES} <= found.keys()
        xids = {key("xid_events_total", xid) for xid in (*map(str, XIDS), "other")}
        assert xids <= found.keys() or not may_listen(uuid)
        (sampled,) = (value for (name, _), value in found.items() if name == "sampled_timestamp_seconds")
        assert now - 60 < sampled <= now
        assert found.keys() - xids - {key("sampled_timestamp_seconds")} <= earlier.keys()
        absent = [series for series in earlier if series not in found]
        print(f"{uuid}: absent, as nvidia-smi does not say them either: {absent}")


def may_listen(uuid: str) -> bool:
    """Whether this driver lets this user hear Xids, asked of NVML itself."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        events = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        finally:
            pynvml.nvmlEventSetFree(events)
    except pynvml.NVMLError as error:
        print(f"{uuid}: no Xids: {error}")
        return False
    finally:
        pynvml.nvmlShutdown()
    return True


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
def test_labels_join_with_a_page_of_dcgm_exporter(naming: Any, tmp_path: Path) -> None:
    """The page has this host's GPUs as nvidia-smi names them; the labels come from the engine's canary."""
    link, hub = LocalLink(), Hub(ServiceConfig())
    rig = make_rig(link=link)
    rig.run(5)
    listener = LocalListener(link, hub)
    rig.canary.detach()
    listener.close()
    own = Exposition(HubCollector(hub)).page("")[0].decode()
    gpus = [
        Gpu(uuid=said.uuid, bus=said.bus, model=said.model, driver=said.driver)
        for said in nvidia_smi.ask().values()
    ]
    theirs = page(naming, gpus, node_name())
    on_cuda_0 = read_identity(torch.device("cuda", 0))
    assert on_cuda_0 is not None
    joined = joined_by_text(own, theirs)
    print(f"joined: {joined}")
    assert joined == {on_cuda_0.gpu_uuid}
    if (binary := os.environ.get("PROMETHEUS")) is None:
        return
    exporters = [Exporter(text) for text in (own, theirs)]
    with prometheus_of(binary, tmp_path, [exporter.port for exporter in exporters]) as ask:
        result = ask(JOINED)
        print(f"joined by Prometheus: {result}")
        assert [labels["gpu_uuid"] for labels in result] == [on_cuda_0.gpu_uuid]
    for exporter in exporters:
        exporter.close()


def test_a_driver_is_asked_at_attach_and_never_again(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NVML function is even looked up by the engine's process, whatever thread; the service samples."""
    asked: list[str] = []
    look_up = pynvml._nvmlGetFunctionPointer

    def counted(name: str) -> Any:
        asked.append(name)
        return look_up(name)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", counted)
    service.ask("on")
    rig = make_rig()
    at_attach = len(asked)
    print(f"{at_attach} NVML calls at attach: {asked}")
    assert at_attach > 0
    rig.run(200)
    rig.canary.reporter.send_hello()
    rig.run(20)
    rig.canary.detach()
    service.ask("off")
    assert asked[at_attach:] == []


def test_the_engines_thread_takes_no_longer_while_health_is_sampled(service: DeviceService) -> None:
    """Two engines do the same steps; each step is timed once with a service that samples and once without.

    It samples 200 times as often as the product does.
    """
    rigs = [make_rig(), make_rig()]
    for rig in rigs:
        rig.run(WARM_UP)
    ratios: dict[str, list[float]] = {"step": [], "hooks": []}
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for first, order in islice(cycle(((0, "off on"), (1, "on off"), (1, "off on"), (0, "on off"))), ROUNDS):
        timed = {}
        for place, state in enumerate(order.split()):
            service.ask(state)
            timed[state] = [timed_step(rigs[(first + place) % 2]) for _ in range(STEPS)]
            seconds[state] += [step for step, _ in timed[state]]
        for (on, on_hooks), (off, off_hooks) in zip(timed["on"], timed["off"], strict=True):
            ratios["step"].append(on / off)
            ratios["hooks"].append(on_hooks / off_hooks)
    service.ask("off")
    assert rigs[0].engine.statistics == rigs[1].engine.statistics, "they did the same work"
    for rig in rigs:
        rig.canary.detach()
    middle = {name: statistics.median(values) for name, values in ratios.items()}
    slowest = {state: 1e6 * statistics.quantiles(values, n=20)[-1] for state, values in seconds.items()}
    print(f"sampled every {SECONDS} s over not sampled, median of {len(ratios['step'])} steps: {middle}")
    print(f"us of a step, median: { {state: 1e6 * statistics.median(v) for state, v in seconds.items()} }")
    print(f"us of a step, 95 %: {slowest}")
    assert middle["step"] < 1.05
    assert middle["hooks"] < 1.05


def timed_step(rig: Rig) -> tuple[float, float]:
    """Seconds of one step, and of the canary's hooks in it."""
    before, started = sum(rig.canary.overhead.values()), time.perf_counter()
    rig.run(1)
    return time.perf_counter() - started, sum(rig.canary.overhead.values()) - before
