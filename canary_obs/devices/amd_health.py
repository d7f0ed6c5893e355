"""Samples the health of every GPU through amdsmi, in NVIDIA's terms where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from canary_obs.devices.amd import identity_of, value_of
from canary_obs.devices.health import DeviceHealth
from canary_obs.devices.identity import GpuIdentity

ERRORS = ("correctable", "uncorrectable", "deferred")
# Blocks whose errors the driver counts. amdsmi_gpu_xgmi_error_status is not asked: reading it clears it for
# everybody else, and `xgmi_wafl` counts the same errors.
BLOCKS = ("UMC", "SDMA", "GFX", "MMHUB", "PCIE_BIF", "HDP", "XGMI_WAFL")
# What holds clocks down, by our reason.
_VIOLATIONS = {
    "sw_power_cap": "active_ppt_pwr",
    "hw_slowdown": "active_prochot_thrm",
    "hw_thermal": "active_socket_thrm",
    "vr_thermal": "active_vr_thrm",
    "memory_thermal": "active_hbm_thrm",
}


class AmdHealth:
    """Every GPU that this process may see. Not thread-safe; `smi` is initialised, and stays so meanwhile."""

    def __init__(self, smi: Any) -> None:
        self._smi = smi
        self._handles: dict[str, tuple[Any, GpuIdentity]] = {}
        for handle in value_of(smi, "amdsmi_get_processor_handles") or ():
            identity = identity_of(smi, handle)
            if identity is not None:  # the partitions of a card have its UUID: the first stands for it
                self._handles.setdefault(identity.gpu_uuid, (handle, identity))

    def sample(self, now: Callable[[], float] = time.time) -> tuple[DeviceHealth, ...]:
        """All GPUs but those that do not say their UUID any more, as after falling off the bus."""
        return tuple(
            self._health(handle, identity, now())
            for uuid, (handle, identity) in self._handles.items()
            if value_of(self._smi, "amdsmi_get_gpu_device_uuid", handle) == uuid
        )

    def wait(self, seconds: float) -> bool:
        """Return False: there are no Xids to wait for."""
        del seconds
        return False

    def close(self) -> None:
        """Do nothing: it listens to nobody."""

    def _health(self, handle: Any, identity: GpuIdentity, now: float) -> DeviceHealth:
        total = value_of(self._smi, "amdsmi_get_gpu_total_ecc_count", handle)
        pages = self._bad_pages(handle)
        return DeviceHealth(
            identity=identity,
            time=now,
            ecc_errors={("volatile", error): count for error, count in _counts(total).items()},
            block_errors=self._block_errors(handle),
            remapped_rows={} if pages is None else {"uncorrectable": pages["RESERVED"]},
            remap_pending=None if pages is None else pages["PENDING"] > 0,
            remap_failed=None if pages is None else pages["UNRESERVABLE"] > 0,
            throttles=self._throttles(handle),
        )

    def _block_errors(self, handle: Any) -> dict[tuple[str, str], int]:
        """Of blocks with RAS; where amdsmi does not say which have it, of those that answer."""
        states = value_of(self._smi, "amdsmi_get_gpu_ras_block_features_enabled", handle)
        enabled = {state["block"] for state in states or () if state["status"] == "ENABLED"}
        found: dict[tuple[str, str], int] = {}
        for block in BLOCKS:
            if states is not None and block not in enabled:
                continue
            number = self._smi.AmdSmiGpuBlock[block]
            counts = _counts(value_of(self._smi, "amdsmi_get_gpu_ecc_count", handle, number))
            found |= {(block.lower(), error): count for error, count in counts.items()}
        return found

    def _bad_pages(self, handle: Any) -> dict[str, int] | None:
        """Number of pages by status; None = it does not say."""
        pages = value_of(self._smi, "amdsmi_get_gpu_bad_page_info", handle)
        if pages is None:
            return None
        # ROCm 6.0 and 6.1 return a sentence in place of an empty list.
        statuses = [] if isinstance(pages, str) else [int(page["status"]) for page in pages]
        return {status.name: statuses.count(status.value) for status in self._smi.AmdSmiMemoryPageStatus}

    def _throttles(self, handle: Any) -> dict[str, bool]:
        """Since ROCm 6.3."""
        said = value_of(self._smi, "amdsmi_get_violation_status", handle) or {}
        return {
            reason: said[name]
            for reason, name in _VIOLATIONS.items()
            if isinstance(said.get(name), bool)  # else "N/A", or absent
        }


def _counts(said: dict[str, Any] | None) -> dict[str, int]:
    """By error; what is "N/A" or absent is left out."""
    counts = {error: (said or {}).get(f"{error}_count") for error in ERRORS}
    return {error: count for error, count in counts.items() if isinstance(count, int)}
