"""Seeded defects of which GPU a rank is on."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_IDENTITY = "tests/devices/test_identity.py::"

NVML = mutants(
    "canary_obs/devices/nvml.py",
    (
        'found = _handle(nvml, nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}") if uuid else None',
        "found = nvml.nvmlDeviceGetHandleByIndex(0)",
        _IDENTITY + "test_the_process_sees_another_number_than_the_driver",
    ),
    (
        'f"MIG-{uuid}"',
        'f"GPU-{uuid}"',
        _IDENTITY + "test_a_mig_device_is_its_card_and_the_number_of_its_instance",
    ),
    (
        "        nvml.nvmlShutdown()\n",
        "        pass\n",
        _IDENTITY + "test_the_process_sees_another_number_than_the_driver",
    ),
)

READER = mutants(
    "canary_obs/runtime/device/gpu_identity.py",
    (
        "reader.join(seconds)",
        "reader.join()",
        _IDENTITY + "test_a_driver_that_hangs_does_not_hold_up_the_start",
    ),
)

ADDRESSES = mutants(
    "canary_obs/devices/identity.py",
    (
        "{bus:02X}",
        "{bus:02x}",
        _IDENTITY + "test_nodes_are_named_as_dcgm_exporter_names_them",
    ),
)

_HEALTH = "tests/devices/test_health.py::"

HEALTH = mutants(
    "canary_obs/devices/nvml_health.py",
    (
        "handle, ctypes.byref(status))",
        "handle, status)",
        _HEALTH + "test_every_value_of_a_present_driver_is_a_series",
    ),
    (
        "values[0].nvmlReturn != self._nvml.NVML_SUCCESS",
        "False",
        _HEALTH + "test_an_older_generation_says_less",
    ),
    (
        "            return True  # its Xid 79 was sent before; the others are still heard\n",
        "            return False\n",
        _HEALTH + "test_xids_are_counted_for_their_gpu",
    ),
)

_AMD = "tests/devices/test_amd_health.py::"

AMD = mutants(
    "canary_obs/devices/amd_health.py",
    (
        'f"{error}_count")',
        'f"{error}_count", 0)',
        _AMD + "test_rocm_6_0_says_less_and_lists_pages_otherwise",
    ),
    (
        "if states is not None and block not in enabled:",
        "if False:",
        _AMD + "test_every_value_is_a_series_under_the_names_of_nvidias",
    ),
    (
        "if isinstance(said.get(name), bool)",
        "if name in said",
        _AMD + "test_every_value_is_a_series_under_the_names_of_nvidias",
    ),
    (
        "[] if isinstance(pages, str) else [int",
        "[int",
        _AMD + "test_rocm_6_0_says_less_and_lists_pages_otherwise",
    ),
)

SAMPLER = mutants(
    "canary_obs/devices/sampler.py",
    (
        "if now - health.time < KEPT_SECONDS",
        "if now",
        _HEALTH + "test_the_sampler_samples_until_it_is_closed_and_forgets_what_is_old",
    ),
)

ALL = (*NVML, *READER, *ADDRESSES, *HEALTH, *AMD, *SAMPLER)
