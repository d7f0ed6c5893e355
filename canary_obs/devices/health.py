"""How a GPU is, as its driver says. What this driver or this GPU does not say is absent, never 0."""

from __future__ import annotations

from dataclasses import dataclass, field

from canary_obs.devices.identity import GpuIdentity

# Xids that are counted by number; the others together, so that the series are few and known.
# 48: double-bit error; 63, 64: a row was remapped, or could not be; 74: NVLink; 79: fallen off the bus;
# 92: many single-bit errors; 94, 95: contained and uncontained errors; 119, 120: GSP; 140: unrecovered ECC
# error; 154: the recovery action changed.
XIDS = (48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 154)
OTHER_XID = "other"

RECOVERY_ACTIONS = (
    "none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset",
    "system_reboot",
)  # fmt: skip
OTHER_ACTION = "other"

# Bits of NVML's clock event reasons that slow a GPU down against its will.
THROTTLES = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """One GPU at one moment. Counts are as the driver keeps them; volatile ones restart with it."""

    identity: GpuIdentity
    time: float  # time.time() of the sample
    ecc_errors: dict[tuple[str, str], int] = field(default_factory=dict)  # by (volatile|aggregate, error)
    block_errors: dict[tuple[str, str], int] = field(default_factory=dict)  # AMD: by (block, error)
    sram_threshold_exceeded: bool | None = None
    remapped_rows: dict[str, int] = field(default_factory=dict)  # by error; AMD: pages that were retired
    remap_pending: bool | None = None  # AMD: a page that the next reset retires
    remap_failed: bool | None = None
    recovery_action: str | None = None
    throttles: dict[str, bool] = field(default_factory=dict)  # by reason
    xids: dict[str, int] | None = None  # events since the service began to listen; None = it cannot


def xid_label(number: int) -> str:
    """The label of an Xid's counter."""
    return str(number) if number in XIDS else OTHER_XID
