"""What amdsmi says of a node's GPUs becomes the same series as NVIDIA's; what it does not say is absent."""

from __future__ import annotations

import pytest

from canary_obs.devices import amd
from canary_obs.devices.amd_health import AmdHealth
from canary_obs.devices.health import DeviceHealth
from canary_obs.devices.nvml import NoLibrary
from canary_obs.devices.sampler import DeviceSampler
from tests.devices.fake_amdsmi import (
    BUSY,
    DRIVER_NOT_LOADED,
    NO_PERM,
    NOT_SUPPORTED,
    ROCM_6_0,
    ROCM_6_4,
    ROCM_7_0,
    AmdSmiMemoryPageStatus,
    Answers,
    FakeAmdSmi,
    FakeCard,
    Refused,
    bad_page,
    mi300x,
)
from tests.devices.test_health import series

UUID, BUS = "73ff74a1-0000-1000-8038-1b8d0e2f8a4c", "00000000:C6:00.0"
_PAGES, _ECC = "amdsmi_get_gpu_bad_page_info", "amdsmi_get_gpu_total_ecc_count"
_HEALTH = {
    name: name
    for name in mi300x()
    if not name.endswith(("bdf", "uuid", "asic_info", "driver_info", "features_enabled"))
}


def health_of(answers: Answers, version: tuple[int, int] = ROCM_7_0) -> DeviceHealth:
    with FakeAmdSmi([FakeCard(answers)], version).installed(), amd.library() as smi:
        (found,) = AmdHealth(smi).sample(lambda: 5.0)
    return found


def family(found: dict[tuple[str, ...], float], name: str) -> dict[frozenset[str], float]:
    """A family's values by the values of its labels, but the UUID."""
    return {frozenset(key[1:]) - {UUID}: value for key, value in found.items() if key[0] == name}


@pytest.mark.parametrize("version", [ROCM_6_4, ROCM_7_0])
def test_every_value_is_a_series_under_the_names_of_nvidias(version, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "n1")
    found = series((health_of(mi300x(version), version),))
    assert found["info", *sorted((UUID, "n1", BUS, "AMD Instinct MI300X", "6.12.12"))] == 1
    assert found["sampled_timestamp_seconds", UUID] == 5
    errors = family(found, "ecc_errors_total")
    assert errors == {
        frozenset({"volatile", "correctable"}): 17, frozenset({"volatile", "uncorrectable"}): 3,
        frozenset({"volatile", "deferred"}): 1,
    }  # fmt: skip
    blocks = family(found, "block_errors_total")
    links = {key: value for key, value in blocks.items() if "xgmi_wafl" in key}
    assert sorted(links.values()) == [0, 1, 5]
    assert blocks[frozenset({"umc", "uncorrectable"})] == 2
    assert not any("sdma" in key for key in blocks), "without RAS its 0 is no count"
    assert family(found, "remapped_rows_total") == {frozenset({"uncorrectable"}): 2}
    assert (found["remap_pending", UUID], found["remap_failed", UUID]) == (1, 0)
    reasons = {"sw_power_cap": 1, "hw_slowdown": 0, "hw_thermal": 0, "memory_thermal": 1}
    assert family(found, "throttled") == {frozenset({name}): value for name, value in reasons.items()}
    assert not any(key[0] in ("xid_events_total", "recovery_action") for key in found), "AMD has none"


def test_rocm_6_0_says_less_and_lists_pages_otherwise():
    """It has no violations and no deferred errors, and says in a sentence that there are no bad pages."""
    answers = mi300x(ROCM_6_0) | {_PAGES: "No bad pages found."}
    found = health_of(answers, ROCM_6_0)
    assert found.ecc_errors == {("volatile", "correctable"): 17, ("volatile", "uncorrectable"): 3}
    assert (found.remapped_rows, found.remap_pending) == ({"uncorrectable": 0}, False)
    assert found.throttles == {}


@pytest.mark.parametrize("code", [NO_PERM, NOT_SUPPORTED, BUSY])
@pytest.mark.parametrize("name", _HEALTH)
def test_what_is_refused_is_absent_and_the_rest_is_there(name, code):
    full = series((health_of(mi300x()),))
    without = series((health_of(mi300x() | {name: Refused(code)}),))
    assert without.items() < full.items()


def test_a_page_that_cannot_be_retired_is_a_failed_remap():
    page = bad_page(0, AmdSmiMemoryPageStatus.UNRESERVABLE)
    found = health_of(mi300x() | {_PAGES: [page]})
    assert (found.remapped_rows, found.remap_pending, found.remap_failed) == (
        {"uncorrectable": 0}, False, True,
    )  # fmt: skip


def test_blocks_are_counted_where_nobody_says_which_have_ras():
    answers = mi300x() | {"amdsmi_get_gpu_ras_block_features_enabled": Refused(NO_PERM)}
    assert {block for block, _ in health_of(answers).block_errors} == {"umc", "gfx", "xgmi_wafl", "sdma"}


def test_a_value_that_is_not_available_is_absent():
    answers = mi300x() | {_ECC: {"correctable_count": "N/A", "uncorrectable_count": 3}}
    assert health_of(answers).ecc_errors == {("volatile", "uncorrectable"): 3}


def test_a_card_in_partitions_is_sampled_once_and_one_without_uuid_never():
    cards = [FakeCard(mi300x()), FakeCard(mi300x()), FakeCard({})]
    with FakeAmdSmi(cards).installed(), amd.library() as smi:
        health = AmdHealth(smi)
        assert [found.identity.gpu_uuid for found in health.sample()] == [UUID]
        assert not health.wait(0.0), "it has no Xids to wait for"
        cards[0].answers["amdsmi_get_gpu_device_uuid"] = Refused(NOT_SUPPORTED)
        assert health.sample() == (), "a card that fell off the bus is left out"


def test_a_service_without_a_driver_for_nvidia_samples_amds():
    faults: list[Exception] = []
    driver = FakeAmdSmi([FakeCard(mi300x())])
    with driver.installed():
        sampler = DeviceSampler(faults.append, interval=0.01)
        assert sampler.sampled.wait(10)
        assert [health.identity.pci_bus_id for health in sampler.latest()] == [BUS]
        sampler.close()
    assert (faults, driver.initialised) == ([], 0)


@pytest.mark.parametrize("init", [DRIVER_NOT_LOADED, NO_PERM])
def test_a_driver_that_is_not_loaded_is_no_fault(init):
    faults: list[Exception] = []
    with FakeAmdSmi([], init=init).installed():
        with pytest.raises(NoLibrary, match="amdsmi cannot be initialised"), amd.library():
            pass
        sampler = DeviceSampler(faults.append)
        sampler.close()
    assert (sampler.latest(), faults) == ((), [])
