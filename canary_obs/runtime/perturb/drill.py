"""Drills: injects one fault into a reserved slot and reports whether a check detects it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots, complete_slots
from canary_obs.config import PREFIX, CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.records import StartDrill
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.device.delayed_device_host import DelayedDeviceHost, Sample
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import ViolationLog
from canary_obs.slot_facts import DrillFinding
from canary_obs.vocabulary import DrillOutcome, Phase, Reason

TIMEOUT_SECONDS = 10.0
# The lowest bit of an element: finite numbers stay finite, should anything read the slot.
_BIT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Injected:
    """A drill under way."""

    id: str
    step: int
    time_ns: int
    began: float  # time.monotonic()


class Drill:
    """Uses records, counters and a log of its own: it reports no violations. Never waits for the device."""

    def __init__(
        self,
        adapter: EngineAdapter,
        config: CanaryConfig,
        device: torch.device,
        send: Callable[[DrillFinding], None],
    ) -> None:
        self._send = send
        self._injected: _Injected | None = None  # the drill under way
        self._checked = False
        self._drills = 0
        self._refusal: str | None = f"drills are disabled in the engine; set {PREFIX}DRILL_ENABLED=true there"
        if not config.drill_enabled:
            return
        try:
            name, slot = adapter.reserve_scratch_slot()
        except UnsupportedEngine as error:
            self._refusal = str(error)
            return
        view = next(view for view in adapter.groups if view.name == name)
        self._state = DeviceState([replace(view, num_slots=slot + 1, window=None)], device, config)
        (self._group,) = self._state.groups
        if self._group.plan.bytes_per_slot == 0:
            self._refusal = f"the bytes of group {name!r} are not covered by fingerprints ({PREFIX}REAL_DATA)"
            return
        self._refusal = None
        self._slot = slot
        self._slots = torch.tensor([slot], dtype=torch.int64, device=device)
        chain = layout.signed(layout.CHAIN_ANCHOR)
        pending = [layout.identity_of(0, 0, layout.RecordState.PENDING, chain), chain, 0, 0]
        self._pending = torch.tensor([pending], dtype=torch.int64, device=device)
        self._bytes = [locate_byte(source, slot, 0) for source in view.sources]
        self._saved = torch.zeros(1, dtype=torch.uint8, device=device)
        self._ring = DelayedDeviceHost(self._state.flat, 2)
        self._log = ViolationLog(self._state, reveal_tokens=False)
        # Compile all kernels now rather than in the first drill.
        self._record(0)
        self._compare(layout.Phase.PATROL)

    @property
    def busy(self) -> bool:
        """Whether a drill is under way."""
        return self._injected is not None

    def start(self, command: StartDrill, step: int) -> None:
        """Inject a fault, or report why not."""
        if self._refusal is not None or self._injected is not None:
            why = self._refusal or "a drill is under way on this rank; wait until it ends"
            self._send(DrillFinding(id=command.id, outcome=DrillOutcome.REFUSED, error=why))
            return
        self._record(step)
        # A violation found here would be a false alarm.
        self._compare(layout.Phase.TAIL)
        self._drills += 1
        self._injected = _Injected(id=command.id, step=step, time_ns=time.time_ns(), began=time.monotonic())
        self._checked = False
        target = self._target()
        self._saved.copy_(target)
        target.bitwise_xor_(_BIT)

    def advance(self, step: int) -> None:
        """First call after `start`: check and restore. Later calls: report the outcome once it is known."""
        injected = self._injected
        if injected is None:
            return
        if not self._checked:
            self._state.tick(step)
            self._compare(layout.Phase.PATROL)
            self._target().copy_(self._saved)
            self._checked = self._ring.push(step, time.monotonic())
            return
        for sample in self._ring.poll():
            self._end(injected, self._judge(injected, sample, step))
            return
        if time.monotonic() - injected.began > TIMEOUT_SECONDS:
            error = f"no counters reached the host within {TIMEOUT_SECONDS:g} s"
            self._end(injected, self._finding(injected, DrillOutcome.MISSED, error))

    def close(self) -> None:
        """Restore the injected fault."""
        if self._injected is not None and not self._checked:
            self._target().copy_(self._saved)
        self._injected = None

    def _target(self) -> torch.Tensor:
        address = self._bytes[self._drills % len(self._bytes)]
        return address.storage[address.offset : address.offset + 1]

    def _record(self, step: int) -> None:
        self._state.tick(step)
        self._group.store(self._slots, self._pending)
        complete_slots(self._state.backend, self._group.buffers, self._group.plan, self._slots)

    def _compare(self, phase: layout.Phase) -> None:
        compare_slots(self._state.backend, self._group.buffers, self._group.plan, self._slots, phase)

    def _judge(self, injected: _Injected, sample: Sample, step: int) -> DrillFinding:
        seen = self._log.read(sample.values, step)
        if any(row.phase is not Phase.PATROL for row in seen):
            error = "a check failed before the fault was injected"
            return self._finding(injected, DrillOutcome.MISSED, error)
        rows = [row for row in seen if row.reason is Reason.KV_DATA and row.slot == self._slot]
        if not rows:
            return self._finding(injected, DrillOutcome.MISSED, "the check found no violation")
        row = rows[0]
        return DrillFinding(
            id=injected.id,
            outcome=DrillOutcome.DETECTED,
            group=row.group,
            slot=row.slot,
            phase=row.phase,
            reason=row.reason,
            latency_steps=row.step - injected.step,
            latency_ms=(row.time_ns - injected.time_ns) / 1e6,
        )

    def _finding(self, injected: _Injected, outcome: DrillOutcome, error: str) -> DrillFinding:
        return DrillFinding(
            id=injected.id, outcome=outcome, error=error, group=self._group.name, slot=self._slot
        )

    def _end(self, injected: _Injected, finding: DrillFinding) -> None:
        assert injected is self._injected
        self._injected = None
        self._send(finding)
