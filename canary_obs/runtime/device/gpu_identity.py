"""The identity of the GPU that a torch device stands for, read once at attach."""

from __future__ import annotations

import logging
import threading

import torch

from canary_obs.devices import amd, nvml
from canary_obs.devices.identity import GpuIdentity, bus_id

log = logging.getLogger("canary_obs")

SECONDS = 5.0  # a driver that hangs, as it does after some faults, must not hold up the engine's start


def read_identity(device: torch.device, seconds: float = SECONDS) -> GpuIdentity | None:
    """Which GPU it is; None = a CPU, or nobody says. Never raises, and waits for at most `seconds`."""
    if device.type != "cuda":
        return None
    found: list[GpuIdentity] = []

    def read() -> None:
        try:
            identity = _read(device)
            if identity is not None:
                found.append(identity)
        except Exception as error:  # noqa: BLE001 - the labels stay absent, the engine serves
            log.info("the GPU's identity is unknown, so metrics do not name it: %s", error)

    reader = threading.Thread(target=read, name="canary-gpu-identity", daemon=True)
    reader.start()
    reader.join(seconds)
    if reader.is_alive():
        log.warning("the GPU's identity was not read within %g s, so metrics do not name it", seconds)
        return None
    return found[0] if found else None


def _read(device: torch.device) -> GpuIdentity | None:
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    known = [number for number in numbers if isinstance(number, int)]
    address = bus_id(*known) if len(known) == 3 else ""
    if torch.version.hip is not None:
        return amd.find_identity(address) if address else None
    return nvml.find_identity(str(getattr(properties, "uuid", "")), address)
