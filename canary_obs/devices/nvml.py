"""Reads a GPU's identity through nvidia-ml-py, where that is installed and finds a driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from canary_obs.devices.identity import GpuIdentity


class NoLibrary(Exception):
    """nvidia-ml-py or the driver's library is missing, or refuses; the text says which."""


@contextmanager
def library() -> Iterator[Any]:
    """The module pynvml, initialised. Raises NoLibrary."""
    try:
        nvml = import_module("pynvml")
    except ImportError as error:
        raise NoLibrary(f"nvidia-ml-py is not installed: {error}") from None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        raise NoLibrary(f"NVML cannot be initialised: {error}") from None
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def find_identity(uuid: str, address: str) -> GpuIdentity | None:
    """The GPU that a process sees under a UUID (without its prefix) or a PCI address; None = there is none.

    The process's own numbering says nothing: CUDA_VISIBLE_DEVICES renumbers. CUDA gives MIG devices a UUID of
    their own, and the PCI address of the whole card. Raises NoLibrary.
    """
    with library() as nvml:
        found = _handle(nvml, nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}") if uuid else None
        number: object = ""
        if found is None and uuid:
            instance = _handle(nvml, nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}")
            if instance is not None:
                found = _value(nvml, lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance))
                number = _value(nvml, lambda: nvml.nvmlDeviceGetGpuInstanceId(instance), "")
        if found is None and address:
            found = _handle(nvml, nvml.nvmlDeviceGetHandleByPciBusId, address)
        return None if found is None else identity_of(nvml, found, str(number))


def identity_of(nvml: Any, handle: Any, instance: str = "") -> GpuIdentity | None:
    """What NVML says of one GPU; None = not even its UUID."""
    uuid = _value(nvml, lambda: nvml.nvmlDeviceGetUUID(handle))
    if uuid is None:
        return None
    return GpuIdentity(
        gpu_uuid=_text(uuid),
        pci_bus_id=_text(_value(nvml, lambda: nvml.nvmlDeviceGetPciInfo(handle).busId, "")).upper(),
        gpu_model=_text(_value(nvml, lambda: nvml.nvmlDeviceGetName(handle), "")),
        gpu_instance=instance,
        driver_version=_text(_value(nvml, nvml.nvmlSystemGetDriverVersion, "")),
    )


def _handle(nvml: Any, find: Callable[[bytes], Any], name: str) -> Any:
    return _value(nvml, lambda: find(name.encode()))


def _value(nvml: Any, read: Callable[[], Any], otherwise: Any = None) -> Any:
    """What `read` returns; `otherwise` where this driver or this user cannot read it."""
    try:
        return read()
    except nvml.NVMLError:
        return otherwise


def _text(value: Any) -> str:
    # Releases of nvidia-ml-py before 11.5 return bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
