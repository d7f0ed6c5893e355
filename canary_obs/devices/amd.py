"""Reads a GPU's identity through amdsmi, which comes with ROCm."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from canary_obs.devices.identity import GpuIdentity


def find_identity(address: str) -> GpuIdentity | None:
    """The GPU at a PCI address; None = without amdsmi, or amdsmi does not know it."""
    try:
        smi = import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # it looks for its library in $ROCM_PATH as it is imported
        return None
    smi.amdsmi_init()
    try:
        for handle in smi.amdsmi_get_processor_handles():
            own = _full_address(str(smi.amdsmi_get_gpu_device_bdf(handle)))
            if own == address:
                return _identity(smi, handle, own)
        return None
    finally:
        smi.amdsmi_shut_down()


def _identity(smi: Any, handle: Any, address: str) -> GpuIdentity:
    model = driver = ""
    with suppress(smi.AmdSmiException, KeyError):
        model = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
    with suppress(smi.AmdSmiException, KeyError):
        driver = str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    return GpuIdentity(
        gpu_uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
        pci_bus_id=address,
        gpu_model=model,
        driver_version=driver,
    )


def _full_address(text: str) -> str:
    """`0000:1b:00.0` as `00000000:1B:00.0`."""
    domain, _, rest = text.partition(":")
    return f"{domain:0>8}:{rest}".upper()
