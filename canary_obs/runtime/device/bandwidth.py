"""How fast this backend hashes KV bytes; measured once, at attach."""

from __future__ import annotations

import time

import torch

from canary_kernels.fingerprint import hash_slots
from canary_obs.runtime.device.state import DeviceState

_CPU_SLOTS, _DEVICE_BYTES = 128, 1 << 31
_REPEATS = 5


def measure_bandwidth(state: DeviceState) -> float:
    """Bytes per second of the best of a few runs over the group with the largest slots; 0 without bytes."""
    group = max(state.groups, key=lambda candidate: candidate.plan.bytes_per_slot)
    size = group.plan.bytes_per_slot
    if not size:
        return 0.0
    device = state.clock.device
    wanted = _CPU_SLOTS if device.type == "cpu" else max(1024, _DEVICE_BYTES // size)
    slots = group.slots_between(0, wanted)
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        started = time.perf_counter()
        hash_slots(state.backend, group.plan, slots)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return slots.numel() * size / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
