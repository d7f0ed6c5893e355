"""Reads a GPU's identity through amdsmi, which comes with ROCm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from canary_obs.devices.identity import GpuIdentity
from canary_obs.devices.nvml import NoLibrary


@contextmanager
def library() -> Iterator[Any]:
    """The module amdsmi, initialised. Raises NoLibrary."""
    try:
        smi = import_module("amdsmi")
    except (ImportError, OSError, KeyError, AttributeError) as error:
        # It looks for its library in $ROCM_PATH as it is imported, and for each function in that.
        raise NoLibrary(f"amdsmi is not installed: {error}") from None
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        raise NoLibrary(f"amdsmi cannot be initialised: {error}") from None
    try:
        yield smi
    finally:
        smi.amdsmi_shut_down()


def find_identity(address: str) -> GpuIdentity | None:
    """The GPU at a PCI address; None = amdsmi does not know it. Raises NoLibrary."""
    with library() as smi:
        for handle in smi.amdsmi_get_processor_handles():
            found = identity_of(smi, handle)
            if found is not None and found.pci_bus_id == address:
                return found
    return None


def identity_of(smi: Any, handle: Any) -> GpuIdentity | None:
    """What amdsmi says of one GPU; None = not even its UUID."""
    uuid = value_of(smi, "amdsmi_get_gpu_device_uuid", handle)
    if uuid is None:
        return None
    asic = value_of(smi, "amdsmi_get_gpu_asic_info", handle) or {}
    driver = value_of(smi, "amdsmi_get_gpu_driver_info", handle) or {}
    return GpuIdentity(
        gpu_uuid=str(uuid),
        pci_bus_id=_full_address(str(value_of(smi, "amdsmi_get_gpu_device_bdf", handle) or "")),
        gpu_model=str(asic.get("market_name", "")),
        driver_version=str(driver.get("driver_version", "")),
    )


def value_of(smi: Any, function: str, *arguments: Any) -> Any:
    """What a function returns; None where this ROCm lacks it, or this driver or this user cannot read it."""
    read: Callable[..., Any] | None = getattr(smi, function, None)
    if read is None:
        return None
    try:
        return read(*arguments)
    except (smi.AmdSmiException, AttributeError):  # AttributeError: the library below lacks the function
        return None


def _full_address(text: str) -> str:
    """`0000:1b:00.0` as `00000000:1B:00.0`."""
    domain, _, rest = text.partition(":")
    return f"{domain:0>8}:{rest}".upper() if rest else ""
