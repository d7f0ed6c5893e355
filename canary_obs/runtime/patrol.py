"""Re-hashes the bytes of every complete record, slot by slot, within a bandwidth budget."""

from __future__ import annotations

import time

import torch

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots, hash_slots
from canary_obs.config import PatrolBudget
from canary_obs.records import PatrolProgress
from canary_obs.runtime.health import Health
from canary_obs.runtime.state import DeviceState, Group

_CPU_CHUNK, _DEVICE_CHUNK = 128, 2048
_MAX_CREDIT_SECONDS = 1.0  # an engine that was busy elsewhere is not charged the whole absence at once


class Patrol:
    """Walks all groups' slots in order, a chunk whenever the budget has paid for one."""

    def __init__(self, state: DeviceState, health: Health, budget: PatrolBudget) -> None:
        self._state, self._health = state, health
        size = _CPU_CHUNK if state.clock.device.type == "cpu" else _DEVICE_CHUNK
        self._chunks = [
            (group, start, min(start + size, group.view.num_slots))
            for group in state.groups
            if group.plan.bytes_per_slot
            for start in range(0, group.view.num_slots, size)
        ]
        self.enabled = budget.enabled and bool(self._chunks)
        rate = budget.bytes_per_second
        if budget.fraction and self.enabled:
            rate = budget.fraction * measured_bandwidth(state, *self._chunks[0])
        self.bytes_per_second = rate
        now = time.monotonic()
        self._checked_at = [now] * len(self._chunks)
        self._cursor = 0
        # On the CPU a check takes the engine's own time: a share of the bandwidth is a share of seconds then,
        # so that a slow or busy machine is not asked for more.
        self._timed = budget.fraction > 0 and state.clock.device.type == "cpu"
        self._rate = budget.fraction if self._timed else rate
        self._credit = 0.0  # seconds when timed, else bytes; below 0 = spent ahead
        self._refilled = self._cycle_started = now
        self.cycles = 0
        self.cycle_seconds: float | None = None

    def advance(self, now: float) -> None:
        """Check as many chunks as the budget has paid for since the last call, at most one cycle."""
        if not self.enabled:
            return
        self._credit += min(now - self._refilled, _MAX_CREDIT_SECONDS) * self._rate
        self._refilled = now
        for _ in self._chunks:
            if self._credit <= 0:
                return
            group, start, stop = self._chunks[self._cursor]
            started = time.perf_counter()
            self._check(group, start, stop)
            size = (stop - start) * group.plan.bytes_per_slot
            self._credit -= time.perf_counter() - started if self._timed else size

    def whole_cycle(self) -> None:
        """Check every chunk once, whatever the budget."""
        for _ in self._chunks:
            self._check(*self._chunks[self._cursor])

    def _check(self, group: Group, start: int, stop: int) -> None:
        slots = group.slot_range[start:stop]
        self._state.tick()
        compare_slots(self._state.backend, group.buffers, group.plan, slots, layout.Phase.PATROL)
        self._health.launch(group.index, layout.Phase.PATROL)
        now = time.monotonic()
        self._checked_at[self._cursor] = now
        self._cursor += 1
        if self._cursor == len(self._chunks):
            self._cursor = 0
            self.cycles += 1
            self.cycle_seconds, self._cycle_started = now - self._cycle_started, now

    @property
    def oldest_check_seconds(self) -> float:
        """Time since the slot checked longest ago was checked, or since attach."""
        return time.monotonic() - min(self._checked_at) if self._checked_at else 0.0

    @property
    def progress(self) -> PatrolProgress | None:
        """None when the patrol is off."""
        if not self.enabled:
            return None
        return PatrolProgress(
            progress=self._cursor / len(self._chunks),
            cycles=self.cycles,
            cycle_seconds=self.cycle_seconds,
            oldest_check_seconds=self.oldest_check_seconds,
            budget_bytes_per_second=self.bytes_per_second,
        )


def measured_bandwidth(state: DeviceState, group: Group, start: int, stop: int) -> float:
    """Bytes per second at which this backend hashes a chunk of slots; measured, at attach only."""
    slots = group.slot_range[start:stop]
    hash_slots(state.backend, group.plan, slots)
    best = float("inf")
    for _ in range(5):
        _wait(state.clock.device)
        started = time.perf_counter()
        hash_slots(state.backend, group.plan, slots)
        _wait(state.clock.device)
        best = min(best, time.perf_counter() - started)
    return slots.numel() * group.plan.bytes_per_slot / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
