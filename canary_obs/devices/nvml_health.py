"""Samples the health of every GPU through nvidia-ml-py. Each value is read by itself: drivers differ."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from canary_obs.devices.health import OTHER_ACTION, RECOVERY_ACTIONS, THROTTLES, XIDS, DeviceHealth, xid_label
from canary_obs.devices.identity import GpuIdentity
from canary_obs.devices.nvml import identity_of

_XID_EVENT = 0x8
_COUNTED = {xid_label(number): 0 for number in (*XIDS, 0)}


class NvmlHealth:
    """Every GPU that this process may see. Not thread-safe; `nvml` is initialised, and stays so meanwhile."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, tuple[Any, GpuIdentity]] = {}
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = self._read(nvml.nvmlDeviceGetHandleByIndex, number)
            identity = None if handle is None else identity_of(nvml, handle)
            if identity is not None:
                self._handles[identity.gpu_uuid] = handle, identity
        self._xids: dict[str, Counter[str]] = {}
        self._events = self._listen()

    def sample(self, now: Callable[[], float] = time.time) -> tuple[DeviceHealth, ...]:
        """All GPUs but those that do not say their UUID any more, as after falling off the bus."""
        return tuple(
            self._health(handle, identity, now())
            for uuid, (handle, identity) in self._handles.items()
            if self._read(self._nvml.nvmlDeviceGetUUID, handle) == uuid
        )

    def wait(self, seconds: float) -> bool:
        """Count the Xids that arrive within this time; returns after the first, or at its end.

        False = Xids cannot be heard here, and nothing was waited for.
        """
        if self._events is None:
            return False
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
        except self._nvml.NVMLError_Timeout:
            return True
        except self._nvml.NVMLError_GpuIsLost:
            return True  # its Xid 79 was sent before; the others are still heard
        except self._nvml.NVMLError:
            self._events, self._xids = None, {}
            return False
        uuid = self._read(self._nvml.nvmlDeviceGetUUID, event.device)
        if event.eventType == _XID_EVENT and uuid in self._xids:
            self._xids[uuid][xid_label(int(event.eventData))] += 1
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._events is not None:
            self._read(self._nvml.nvmlEventSetFree, self._events)
            self._events = None

    def _listen(self) -> Any:
        events = self._read(self._nvml.nvmlEventSetCreate)
        if events is None:
            return None
        for uuid, (handle, _) in self._handles.items():
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, _XID_EVENT, events)
            except self._nvml.NVMLError:
                continue  # no permission, or a GPU without events: its Xids are absent
            self._xids[uuid] = Counter(_COUNTED)
        if not self._xids:
            self._read(self._nvml.nvmlEventSetFree, events)
            return None
        return events

    def _health(self, handle: Any, identity: GpuIdentity, now: float) -> DeviceHealth:
        nvml, rows = self._nvml, self._read(self._nvml.nvmlDeviceGetRemappedRows, handle)
        # (correctable, uncorrectable, pending, failed); Ampere and later have it.
        xids = self._xids.get(identity.gpu_uuid)
        return DeviceHealth(
            identity=identity,
            time=now,
            ecc_errors=self._ecc_errors(handle),
            sram_threshold_exceeded=self._sram(handle),
            remapped_rows={} if rows is None else {"correctable": rows[0], "uncorrectable": rows[1]},
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            recovery_action=self._recovery_action(handle),
            throttles=self._throttles(nvml, handle),
            xids=None if xids is None else dict(xids),
        )

    def _ecc_errors(self, handle: Any) -> dict[tuple[str, str], int]:
        nvml, found = self._nvml, {}
        for kind, counter in (("volatile", nvml.NVML_VOLATILE_ECC), ("aggregate", nvml.NVML_AGGREGATE_ECC)):
            for error, number in (
                ("correctable", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                ("uncorrectable", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ):
                value = self._read(nvml.nvmlDeviceGetTotalEccErrors, handle, number, counter)
                if value is not None:
                    found[kind, error] = int(value)
        return found

    def _sram(self, handle: Any) -> bool | None:
        status_type = getattr(self._nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
        if status_type is None:
            return None
        status = status_type()
        # nvidia-ml-py hands it on as it is: by value, the driver refuses it.
        done = self._read(self._nvml.nvmlDeviceGetSramEccErrorStatus, handle, ctypes.byref(status))
        return None if done is None else bool(status.bThresholdExceeded)

    def _recovery_action(self, handle: Any) -> str | None:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return None
        values = self._read(self._nvml.nvmlDeviceGetFieldValues, handle, [field])
        if values is None or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        number = int(values[0].value.uiVal)
        return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else OTHER_ACTION

    def _throttles(self, nvml: Any, handle: Any) -> dict[str, bool]:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            read = getattr(nvml, name, None)  # the first from R535 on, the second until it is removed
            mask = None if read is None else self._read(read, handle)
            if mask is not None:
                return {reason: bool(int(mask) & bit) for reason, bit in THROTTLES.items()}
        return {}

    def _read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """None where this driver, this GPU or this user cannot."""
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None
