"""A driver's NVML library with recorded answers, below the real nvidia-ml-py.

nvidia-ml-py looks functions up in its library by name and passes ctypes objects; here Python fills them. A
function that a driver generation lacks is an attribute that is missing, as in its real library.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml

_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
_POINTER = ctypes.sizeof(ctypes.c_void_p)
Answer = Any  # a number, text, or an error code wrapped in Refused


@dataclass(frozen=True, slots=True)
class Refused:
    """The code that a call returns in place of an answer."""

    code: int


@dataclass(slots=True)
class FakeGpu:
    """One GPU; what a function answers by its NVML name. `mig`: its instances' UUIDs and numbers."""

    uuid: str
    bus: str
    name: str = "NVIDIA H200"
    answers: dict[str, Answer] = field(default_factory=dict)
    mig: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class FakeDriver:
    """`lacks`: functions that this generation of the driver does not have. `init`: nvmlInit's own answer."""

    gpus: list[FakeGpu]
    version: str = "580.95.05"
    lacks: frozenset[str] = frozenset()
    init: int = pynvml.NVML_SUCCESS
    events: list[tuple[int, int]] = field(default_factory=list)  # (GPU's number, Xid) or (-1, error)
    registers: int = pynvml.NVML_SUCCESS
    initialised: int = 0  # nvmlInit less nvmlShutdown
    calls: list[str] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)  # set while no event is left

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.lacks:
            raise AttributeError(name)
        own = getattr(type(self), f"_{name}", None)
        if own is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return int(own(self, *arguments))

        return call

    def _nvmlInitWithFlags(self, flags: Any) -> int:  # noqa: N802 - NVML's names
        self.initialised += self.init == pynvml.NVML_SUCCESS
        return self.init

    def _nvmlShutdown(self) -> int:  # noqa: N802
        self.initialised -= 1
        return pynvml.NVML_SUCCESS

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:  # noqa: N802
        text.value = self.version.encode()
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetCount_v2(self, number: Any) -> int:  # noqa: N802
        number._obj.value = len(self.gpus)
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        number = index.value
        if "nvmlDeviceGetHandleByIndex" in self.gpus[number].answers:
            return self.gpus[number].answers["nvmlDeviceGetHandleByIndex"].code
        return _point(device, number * 100 + 100)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:  # noqa: N802
        name = uuid.value.decode()
        for number, gpu in enumerate(self.gpus):
            if gpu.uuid == name:
                return _point(device, number * 100 + 100)
            if name in gpu.mig:
                return _point(device, number * 100 + 101 + list(gpu.mig).index(name))
        return pynvml.NVML_ERROR_NOT_FOUND

    def _nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, device: Any) -> int:  # noqa: N802
        for number, gpu in enumerate(self.gpus):
            if gpu.bus.upper() == bus.value.decode().upper():
                return _point(device, number * 100 + 100)
        return pynvml.NVML_ERROR_NOT_FOUND

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance: Any, device: Any) -> int:  # noqa: N802
        return _point(device, _address(instance) // 100 * 100)

    def _nvmlDeviceGetGpuInstanceId(self, instance: Any, number: Any) -> int:  # noqa: N802
        gpu, place = divmod(_address(instance), 100)
        number._obj.value = list(self.gpus[gpu - 1].mig.values())[place - 1]
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetUUID(self, device: Any, text: Any, size: Any) -> int:  # noqa: N802
        return self._fill_text(device, "nvmlDeviceGetUUID", text, self._gpu(device).uuid)

    def _nvmlDeviceGetName(self, device: Any, text: Any, size: Any) -> int:  # noqa: N802
        return self._fill_text(device, "nvmlDeviceGetName", text, self._gpu(device).name)

    def _nvmlDeviceGetPciInfo_v3(self, device: Any, info: Any) -> int:  # noqa: N802
        info._obj.busId = self._gpu(device).bus.encode()
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetTotalEccErrors(self, device: Any, error: Any, counter: Any, number: Any) -> int:  # noqa: N802
        answer = self._gpu(device).answers.get("nvmlDeviceGetTotalEccErrors", Refused(_NOT_SUPPORTED))
        if not isinstance(answer, Refused):
            answer = answer[counter.value, error.value]
        return _fill(answer, number)

    def _nvmlDeviceGetRemappedRows(self, device: Any, *numbers: Any) -> int:  # noqa: N802
        answer = self._gpu(device).answers.get("nvmlDeviceGetRemappedRows", Refused(_NOT_SUPPORTED))
        if isinstance(answer, Refused):
            return answer.code
        for number, value in zip(numbers, answer, strict=True):
            number._obj.value = value
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetSramEccErrorStatus(self, device: Any, status: Any) -> int:  # noqa: N802
        answer = self._gpu(device).answers.get("nvmlDeviceGetSramEccErrorStatus", Refused(_NOT_SUPPORTED))
        if isinstance(answer, Refused):
            return answer.code
        status._obj.bThresholdExceeded = answer  # as in C: a pointer, not the structure
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> int:  # noqa: N802
        for value in values._obj:
            answer = self._gpu(device).answers.get(f"field {value.fieldId}", Refused(_NOT_SUPPORTED))
            value.nvmlReturn = answer.code if isinstance(answer, Refused) else pynvml.NVML_SUCCESS
            value.value.uiVal = 0 if isinstance(answer, Refused) else answer
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, mask: Any) -> int:  # noqa: N802
        return _fill(self._gpu(device).answers.get("clocks", Refused(_NOT_SUPPORTED)), mask)

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, mask: Any) -> int:  # noqa: N802
        return _fill(self._gpu(device).answers.get("clocks", Refused(_NOT_SUPPORTED)), mask)

    def _nvmlEventSetCreate(self, events: Any) -> int:  # noqa: N802
        return _point(events, 7)

    def _nvmlEventSetFree(self, events: Any) -> int:  # noqa: N802
        return pynvml.NVML_SUCCESS

    def _nvmlDeviceRegisterEvents(self, device: Any, kinds: Any, events: Any) -> int:  # noqa: N802
        return self.registers

    def _nvmlEventSetWait_v2(self, events: Any, data: Any, milliseconds: Any) -> int:  # noqa: N802
        if not self.events:
            self.waiting.set()
            time.sleep(milliseconds.value / 1000)  # as the driver does
            return pynvml.NVML_ERROR_TIMEOUT
        number, xid = self.events.pop(0)
        if number < 0:
            return xid  # the driver's own error
        data._obj.eventType, data._obj.eventData = pynvml.nvmlEventTypeXidCriticalError, xid
        ctypes.memmove(
            ctypes.addressof(data._obj), ctypes.byref(ctypes.c_void_p(number * 100 + 100)), _POINTER
        )
        return pynvml.NVML_SUCCESS

    def _fill_text(self, device: Any, name: str, text: Any, value: str) -> int:
        answer = self._gpu(device).answers.get(name)
        if isinstance(answer, Refused):
            return answer.code
        text.value = value.encode()
        return pynvml.NVML_SUCCESS

    def _gpu(self, device: Any) -> FakeGpu:
        return self.gpus[_address(device) // 100 - 1]

    @contextmanager
    def installed(self) -> Iterator[FakeDriver]:
        """nvidia-ml-py uses this driver meanwhile."""
        before = pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlLib = self
        try:
            yield self
        finally:
            pynvml.nvmlLib, cache = before
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml._nvmlGetFunctionPointer_cache.update(cache)


def _fill(answer: Answer, number: Any) -> int:
    if isinstance(answer, Refused):
        return answer.code
    number._obj.value = answer
    return pynvml.NVML_SUCCESS


def _address(device: Any) -> int:
    return ctypes.cast(device, ctypes.c_void_p).value or 0


def _point(device: Any, address: int) -> int:
    pointer = device._obj
    ctypes.memmove(ctypes.byref(pointer), ctypes.byref(ctypes.c_void_p(address)), _POINTER)
    return pynvml.NVML_SUCCESS
