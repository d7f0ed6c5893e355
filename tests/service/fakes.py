"""Messages as an engine would send them, and an engine that answers commands over a real link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from canary_obs.devices.health import DeviceHealth
from canary_obs.devices.identity import GpuIdentity
from canary_obs.injection_counts import PerturbCount
from canary_obs.plurals import counted
from canary_obs.records import (
    CancelSweep,
    Command,
    DrillReport,
    EngineMessage,
    GroupCounters,
    GroupInfo,
    Hello,
    Identity,
    PatrolProgress,
    Ping,
    PipelineStatus,
    Snapshot,
    StartDrill,
    StartSweep,
    SwaDivergence,
    SweepProgress,
    SweepReport,
    Tainted,
    Violation,
)
from canary_obs.slot_facts import DrillFinding, TaintedRequest
from canary_obs.transport.links import EngineLink
from canary_obs.vocabulary import (
    Cause,
    Completeness,
    DrillOutcome,
    GoodCheck,
    Mode,
    Part,
    PerturbMode,
    Phase,
    Reason,
    State,
    SweepStatus,
    Trigger,
)

FULL = GroupInfo(
    name="full", layers=2, parts=(Part.K, Part.V), slots=100, slot_bytes=64, protected_slot_bytes=64
)

GPU = GpuIdentity(
    gpu_uuid="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",
    pci_bus_id="00000000:1B:00.0",
    gpu_model="NVIDIA H200",
    driver_version="580.95.05",
)

HEALTH = DeviceHealth(
    identity=GPU,
    time=1_000.0,
    ecc_errors={("volatile", "correctable"): 3},
    block_errors={("umc", "correctable"): 2},
    sram_threshold_exceeded=False,
    remapped_rows={"uncorrectable": 1},
    remap_pending=True,
    remap_failed=False,
    recovery_action="none",
    throttles={"hw_thermal": False},
    xids={"94": 1},
)


def identity(rank: int = 0, *, started_ns: int = 1_000, pid: int = 7, instance: str = "test") -> Identity:
    return Identity(engine="fake", instance=instance, rank=rank, started_ns=started_ns, pid=pid, device="cpu")


def hello(who: Identity) -> Hello:
    return Hello(
        identity=who,
        mode=Mode.LOG,
        backend="torch",
        engine_version="1.0",
        groups=(FULL,),
        record_bytes=3200,
        allocated_bytes=6400,
        settings={"mode": "log"},
        versions={"canary_obs": "0.1.0"},
        node="node-1",
        gpu=GPU,
        model="tiny@1",
    )


def counters(step: int, violations: int = 0) -> GroupCounters:
    lanes = {phase: dict.fromkeys(Reason, 0) for phase in Phase}
    lanes[Phase.SWEEP][Reason.KV_DATA] = violations
    return GroupCounters(
        runs=dict.fromkeys(Phase, step),
        verified=dict.fromkeys(Phase, 10 * step),
        hashed=dict.fromkeys(Phase, 2 * step),
        unverified=dict.fromkeys(Cause, step),
        written=step,
        completed=step,
        violations=lanes,
        redetections=dict.fromkeys(Reason, 0),
    )


def snapshot(who: Identity, step: int, *, violations: int = 0, **changes: Any) -> Snapshot:
    plain = Snapshot(
        identity=who,
        sequence=step,
        time_ns=time.time_ns(),
        mode=Mode.LOG,
        backend="torch",
        step=step,
        state=State.VIOLATED if violations else State.OK,
        state_reasons=(counted(violations, "violation"),) if violations else (),
        groups={"full": counters(step, violations)},
        sweep_passes=dict.fromkeys(Trigger, step),
        last_sweep_ns=1_700_000_000_000_000_000,
        sweep=None,
        patrol=PatrolProgress(
            progress=0.5,
            cycles=step,
            cycle_seconds=7.0,
            oldest_check_seconds=3.0,
            budget_bytes_per_second=1e9,
        ),
        pipeline=PipelineStatus(lag_steps=1, lag_seconds=0.01, skipped=step),
        overhead_seconds={"head": 0.25 * step, "tail": 0.5 * step},
        step_seconds=1.0 * step,
        observer_faults={},
        violation_events_dropped=0,
        messages_dropped=0,
        perturbations={PerturbMode.REAL_KV_USED: PerturbCount(injected=step, detected=step, open=1)},
        paused=False,
        kernels_stalled={},
        forwards={"full": step},
        forwards_checked={"full": step},
        swa_divergence=SwaDivergence(
            step=step,
            verified_full=20 * step,
            verified_swa=7 * step,
            index_divergence=5,
            out_of_window=9,
            full_groups=("full",),
            swa_groups=("swa",),
        ),
    )
    return msgspec.structs.replace(plain, **changes)


_events = count(1)  # a hub ignores an event of a rank that it has received already


def violation(slot: int = 3, **changes: Any) -> Violation:
    plain = Violation(
        phase=Phase.SWEEP,
        reason=Reason.KV_DATA,
        group="full",
        part=Part.K,
        step=5,
        event=next(_events),
        slot=slot,
        position=2,
        request="r1",
        expected="0x01",
        actual="0x02",
        lag_steps=1,
        time_ns=1_700_000_000_000_000_000,
    )
    return msgspec.structs.replace(plain, **changes)


def progress(sweep_id: str, status: SweepStatus, *, checked: int = 0, **changes: Any) -> SweepProgress:
    plain = SweepProgress(
        id=sweep_id,
        trigger=Trigger.DEMAND,
        status=status,
        groups=("full",),
        data=True,
        total=100,
        checked=checked,
        skipped=dict.fromkeys(Cause, 0),
        violations=0,
        started_ns=1,
        seconds=0.5,
        step=5,
    )
    return msgspec.structs.replace(plain, **changes)


def drilled(who: Identity, name: str) -> DrillReport:
    found = DrillFinding(
        id=name, outcome=DrillOutcome.DETECTED, group="full", slot=0, phase=Phase.PATROL,
        reason=Reason.KV_DATA, latency_steps=1, latency_ms=2.5,
    )  # fmt: skip
    return DrillReport(identity=who, finding=found)


class FakeEngine:
    """A thread that sends snapshots over a link and answers commands like a rank."""

    def __init__(self, link: EngineLink, who: Identity, *, finish_sweeps: bool = True) -> None:
        self.link, self.who, self.finish_sweeps = link, who, finish_sweeps
        self.received: list[Command] = []
        self._stop = threading.Event()
        self._step = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Fall silent, as a crash would; the link stays as it is."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        self.link.send(hello(self.who))
        while not self._stop.wait(0.01):
            self._step += 1
            self.link.send(snapshot(self.who, self._step))
            for command in self.link.receive():
                self.received.append(command)
                for answer in self._answers(command):
                    self.link.send(answer)

    def _answers(self, command: Command) -> list[EngineMessage]:
        if isinstance(command, Ping) and command.want_hello:
            return [hello(self.who)]
        if isinstance(command, StartSweep):
            states = [SweepStatus.RUNNING] + [SweepStatus.PASSED] * self.finish_sweeps
        elif isinstance(command, StartDrill):
            return [drilled(self.who, command.id)]
        elif isinstance(command, CancelSweep):
            states = [SweepStatus.CANCELLED]
        else:
            return []
        return [SweepReport(identity=self.who, progress=progress(command.id, state)) for state in states]


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The condition's value once it is true; fails the test when it never is."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)  # polling interval, not synchronisation: the deadline decides
    return value


def tainted(who: Identity, number: int = 1, *names: str, incident: str = "none", **changes: Any) -> Tainted:
    """A damage that these requests have read."""
    requests = tuple(
        TaintedRequest(request=name, running=True, step=5, derived=False, first_output=2, outputs=3)
        for name in names
    )
    fields = {
        "group": "full", "slot": 7, "reason": Reason.KV_DATA, "phase": Phase.SWEEP, "step": 6, "good_step": 4,
        "good_check": GoodCheck.PATROL, "completeness": Completeness.KNOWN, "cause": None, "time_ns": 1,
    }  # fmt: skip
    return Tainted(identity=who, number=number, incident=incident, requests=requests, **(fields | changes))
