"""The Python package amdsmi with recorded answers, in the signatures of ROCm 6.0, 6.4 and 7.0.

As the real one it raises its own exceptions, says "N/A" for a value that the driver has not, wants handles
that it gave out itself, and refuses to be asked before `amdsmi_init`. (ROCm/amdsmi: py-interface.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from unittest import mock

NO_PERM, NOT_SUPPORTED, BUSY, DRIVER_NOT_LOADED, NOT_INIT = 10, 2, 30, 34, 32
Answers = dict[str, Any]  # by function: what it returns, or Refused

ROCM_6_0, ROCM_6_4, ROCM_7_0 = (6, 0), (6, 4), (7, 0)
_FUNCTIONS = {
    "amdsmi_get_gpu_device_bdf": ROCM_6_0, "amdsmi_get_gpu_device_uuid": ROCM_6_0,
    "amdsmi_get_gpu_asic_info": ROCM_6_0, "amdsmi_get_gpu_driver_info": ROCM_6_0,
    "amdsmi_get_gpu_total_ecc_count": ROCM_6_0, "amdsmi_get_gpu_ecc_count": ROCM_6_0,
    "amdsmi_get_gpu_ras_block_features_enabled": ROCM_6_0, "amdsmi_get_gpu_bad_page_info": ROCM_6_0,
    "amdsmi_get_violation_status": (6, 3),
}  # fmt: skip


class AmdSmiException(Exception):
    """Base of all."""


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code


class AmdSmiParameterException(AmdSmiException):
    """A handle that the library did not give out."""


class AmdSmiGpuBlock(IntEnum):
    INVALID = 0
    UMC = 1
    SDMA = 2
    GFX = 4
    MMHUB = 8
    ATHUB = 16
    PCIE_BIF = 32
    HDP = 64
    XGMI_WAFL = 128
    RESERVED = 1 << 63


class AmdSmiMemoryPageStatus(IntEnum):
    RESERVED = 0
    PENDING = 1
    UNRESERVABLE = 2


@dataclass(frozen=True, slots=True)
class Refused:
    """The status code that a call fails with."""

    code: int


@dataclass(slots=True, eq=False)
class FakeCard:
    """One GPU, which is its own handle."""

    answers: Answers


@dataclass(slots=True)
class FakeAmdSmi:
    """Stands in for the module `amdsmi`."""

    cards: list[FakeCard]
    version: tuple[int, int] = ROCM_7_0
    init: int = 0
    initialised: int = 0
    calls: list[str] = field(default_factory=list)
    AmdSmiException = AmdSmiException
    AmdSmiLibraryException = AmdSmiLibraryException
    AmdSmiGpuBlock = AmdSmiGpuBlock
    AmdSmiMemoryPageStatus = AmdSmiMemoryPageStatus

    def amdsmi_init(self) -> None:
        if self.init:
            raise AmdSmiLibraryException(self.init)
        self.initialised += 1

    def amdsmi_shut_down(self) -> None:
        self.initialised -= 1

    def amdsmi_get_processor_handles(self) -> list[FakeCard]:
        if not self.initialised:
            raise AmdSmiLibraryException(NOT_INIT)
        return list(self.cards)

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS or self.version < _FUNCTIONS[name]:
            raise AttributeError(name)

        def call(handle: Any, *arguments: Any) -> Any:
            self.calls.append(name)
            if not isinstance(handle, FakeCard):
                raise AmdSmiParameterException(handle)
            answer = handle.answers.get(name, Refused(NOT_SUPPORTED))
            if isinstance(answer, dict) and arguments:
                answer = answer.get(arguments[0], Refused(NOT_SUPPORTED))
            if isinstance(answer, Refused):
                raise AmdSmiLibraryException(answer.code if self.initialised else NOT_INIT)
            return answer

        return call

    @contextmanager
    def installed(self) -> Iterator[FakeAmdSmi]:
        """`import amdsmi` finds this one meanwhile; there is no NVIDIA driver."""
        with mock.patch.dict(sys.modules, {"amdsmi": self, "pynvml": None}):  # type: ignore[dict-item]
            yield self


def counts(correctable: int, uncorrectable: int, deferred: int | None = 0) -> dict[str, int]:
    """Error counts as a call returns them; ROCm 6.0 has no deferred ones."""
    found = {"correctable_count": correctable, "uncorrectable_count": uncorrectable}
    return found if deferred is None else {**found, "deferred_count": deferred}


def bad_page(number: int, status: AmdSmiMemoryPageStatus) -> dict[str, int]:
    """One page as a call lists it."""
    return {"value": number, "page_address": number << 12, "page_size": 4096, "status": int(status)}


def _violations(version: tuple[int, int]) -> dict[str, Any]:
    """Package power and HBM temperature hold an MI300X down; this one says nothing of its regulators."""
    names = ("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm")
    said = dict(zip(names, (False, True, False, "N/A", True), strict=True))
    found = {"reference_timestamp": 1, "acc_counter": 9, **{f"acc_{name}": 3 for name in names}}
    found |= {f"active_{name}": value for name, value in said.items()}
    found["active_gfx_clk_below_host_limit"] = "N/A" if version >= ROCM_7_0 else True
    if version >= ROCM_7_0:
        found["active_gfx_clk_below_host_limit_total"] = [["N/A", 1], ["N/A", 0]]
    return found


def mi300x(version: tuple[int, int] = ROCM_7_0) -> Answers:
    """As an MI300X answers that has retired two pages and must be reset to retire a third."""
    page, blocks = AmdSmiMemoryPageStatus, AmdSmiGpuBlock
    deferred = None if version == ROCM_6_0 else 1
    enabled = (blocks.UMC, blocks.GFX, blocks.XGMI_WAFL)
    return {
        "amdsmi_get_gpu_device_bdf": "0000:c6:00.0",
        "amdsmi_get_gpu_device_uuid": "73ff74a1-0000-1000-8038-1b8d0e2f8a4c",
        "amdsmi_get_gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
        "amdsmi_get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.12.12"},
        "amdsmi_get_gpu_total_ecc_count": counts(17, 3, deferred),
        "amdsmi_get_gpu_ras_block_features_enabled": [
            {"block": block.name, "status": "ENABLED" if block in enabled else "DISABLED"}
            for block in blocks
            if block not in (blocks.INVALID, blocks.RESERVED)
        ],
        "amdsmi_get_gpu_ecc_count": {
            blocks.UMC: counts(12, 2, deferred), blocks.GFX: counts(0, 0, 0),
            blocks.XGMI_WAFL: counts(5, 1, 0), blocks.SDMA: counts(0, 0, 0),
        },
        "amdsmi_get_gpu_bad_page_info": [
            bad_page(0, page.RESERVED), bad_page(1, page.PENDING), bad_page(2, page.RESERVED),
        ],
        "amdsmi_get_violation_status": _violations(version),
    }  # fmt: skip
