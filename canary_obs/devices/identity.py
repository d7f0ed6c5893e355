"""Which GPU a rank runs on, in the spelling of dcgm-exporter, so that series of both join."""

from __future__ import annotations

import os
import socket

import msgspec


class GpuIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU. Under MIG `gpu_uuid` is that of the whole card, which fails as one; "" = unknown."""

    gpu_uuid: str  # "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    pci_bus_id: str = ""  # "00000000:1B:00.0": eight digits of the domain, capital letters
    gpu_model: str = ""  # "NVIDIA H200"
    gpu_instance: str = ""  # MIG: number of the GPU instance, as in the label GPU_I_ID; "" = the whole GPU
    driver_version: str = ""


def node_name() -> str:
    """$NODE_NAME, else the host's name: what dcgm-exporter's label Hostname (from 4.8.3: hostname) holds."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


def bus_id(domain: int, bus: int, device: int, function: int = 0) -> str:
    """A PCI address as NVML and dcgm-exporter write it."""
    return f"{domain:08X}:{bus:02X}:{device:02X}.{function:X}"
