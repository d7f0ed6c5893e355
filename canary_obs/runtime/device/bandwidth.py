"""Measures how fast this backend hashes KV bytes, once at attach."""

from __future__ import annotations

import time

import torch

from canary_kernels.fingerprint import hash_slots
from canary_obs.runtime.device.state import DeviceState

_CPU_SLOTS, _DEVICE_BYTES = 128, 1 << 31
_REPEATS = 5


def measure_bandwidth(state: DeviceState) -> float:
    """Bytes per second, the best of a few runs on the group with the largest slots; 0 without KV bytes."""
    group = max(state.groups, key=lambda candidate: candidate.plan.bytes_per_slot)
    size = group.plan.bytes_per_slot
    if not size:
        return 0.0
    device = state.clock.device
    count = _CPU_SLOTS if device.type == "cpu" else max(1024, _DEVICE_BYTES // size)
    slots = group.slots_between(0, count)
    best = float("inf")
    for _ in range(_REPEATS):
        _synchronize(device)
        started = time.perf_counter()
        hash_slots(state.backend, group.plan, slots)
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return slots.numel() * size / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
