"""What `nvidia-smi -q -x` says of each GPU, in the terms of kv_canary_device_*; None = it does not say."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from xml.etree import ElementTree

# Names of clock reasons there, by ours; drivers before R535 call them clocks_throttle_reason_*.
_THROTTLES = {
    "sw_power_cap": "sw_power_cap", "hw_slowdown": "hw_slowdown", "sw_thermal": "sw_thermal_slowdown",
    "hw_thermal": "hw_thermal_slowdown", "hw_power_brake": "hw_power_brake_slowdown",
}  # fmt: skip
# Texts of recovery actions, by NVML's names.
_ACTIONS = {
    "None": "none", "Reset": "gpu_reset", "Reboot": "node_reboot", "Drain P2P": "drain_p2p",
    "Drain and Reset": "drain_and_reset",
}  # fmt: skip
_YES = {"Yes": True, "1": True, "No": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One GPU."""

    uuid: str
    bus: str
    model: str
    driver: str
    ecc: dict[tuple[str, str], int | None]  # by (volatile|aggregate, correctable|uncorrectable)
    sram_exceeded: bool | None
    remapped: dict[str, int | None]  # by error
    remap_pending: bool | None
    remap_failed: bool | None
    recovery_action: str | None
    throttles: dict[str, bool | None]


def ask() -> dict[str, Said]:
    """All GPUs by UUID."""
    command = ["nvidia-smi", "-q", "-x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return parse(done.stdout)


def parse(text: str) -> dict[str, Said]:
    """All GPUs of a report, by UUID."""
    report = ElementTree.fromstring(text)
    driver = report.findtext("driver_version", "")
    found = [_said(gpu, driver) for gpu in report.iter("gpu")]
    return {said.uuid: said for said in found}


def _said(gpu: ElementTree.Element, driver: str) -> Said:
    return Said(
        uuid=gpu.findtext("uuid", ""),
        bus=gpu.findtext("pci/pci_bus_id", ""),
        model=gpu.findtext("product_name", ""),
        driver=driver,
        ecc={
            (counter, error): _errors(gpu.find(f"ecc_errors/{counter}"), error)
            for counter in ("volatile", "aggregate")
            for error in ("correctable", "uncorrectable")
        },
        sram_exceeded=_YES.get(gpu.findtext("ecc_errors/aggregate/sram_threshold_exceeded", "")),
        remapped={
            error: _number(gpu.findtext(f"remapped_rows/remapped_row_{short}", ""))
            for error, short in (("correctable", "corr"), ("uncorrectable", "unc"))
        },
        remap_pending=_YES.get(gpu.findtext("remapped_rows/remapped_row_pending", "")),
        remap_failed=_YES.get(gpu.findtext("remapped_rows/remapped_row_failure", "")),
        recovery_action=_ACTIONS.get(gpu.findtext("gpu_recovery_action", "")),
        throttles={ours: _active(gpu, theirs) for ours, theirs in _THROTTLES.items()},
    )


def _errors(section: ElementTree.Element | None, error: str) -> int | None:
    """The sum over SRAM and DRAM; `sram_uncorrectable_parity` is one of its uncorrectable rows."""
    rows = [] if section is None else list(section)
    counts = [_number(row.text or "") for row in rows if f"_{error}" in row.tag]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _active(gpu: ElementTree.Element, reason: str) -> bool | None:
    for spelling in ("event", "throttle"):
        text = gpu.findtext(f"clocks_{spelling}_reasons/clocks_{spelling}_reason_{reason}")
        if text is not None:
            return {"Active": True, "Not Active": False}.get(text)
    return None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
