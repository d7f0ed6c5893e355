"""Sends the service what this rank knows, and receives its commands."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from canary_obs import __version__
from canary_obs.config import CanaryConfig, masked
from canary_obs.config_values import parse_ranks
from canary_obs.devices.identity import node_name
from canary_obs.heals import Heal
from canary_obs.records import (
    Command,
    DrillReport,
    EngineMessage,
    Goodbye,
    Heals,
    Hello,
    Identity,
    Snapshot,
    SweepProgress,
    SweepReport,
    Violation,
    Violations,
)
from canary_obs.runtime.device.gpu_identity import read_identity
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.report.incident_namer import IncidentNamer
from canary_obs.runtime.report.step_watch import StepWatch
from canary_obs.runtime.run_state import RunState
from canary_obs.slot_facts import DrillFinding
from canary_obs.transport.links import EngineLink

BACKLOG = 1024  # violations, which one message can hold
_FLUSH_SECONDS = 1.0
SERVICE_START_SECONDS = 15.0  # a service that starts with the engine may take as long to be heard


class Reporter:
    """Owns the link. Never blocks; violations that cannot be sent now wait in a bounded backlog."""

    def __init__(
        self,
        state: DeviceState,
        config: CanaryConfig,
        engine: tuple[str, str, str | None],
        link: EngineLink | None,
    ) -> None:
        """`engine` is its name, its version and the model it serves; without a link nothing is sent."""
        name, self._engine_version, self._model = engine
        self._node, self._gpu = node_name(), read_identity(state.clock.device)
        self._state, self._config, self._link = state, config, link
        self.identity = Identity(
            engine=name if config.engine == "unknown" else config.engine,
            instance=config.instance,
            rank=config.rank,
            started_ns=time.time_ns(),
            pid=os.getpid(),
            device=device_name(state.clock.device),
        )
        # Findings until they are acknowledged, for a service that starts while they are known.
        self._findings: deque[Violation] = deque(maxlen=BACKLOG)
        self.backlog: deque[Violation] = deque(maxlen=BACKLOG)  # violations that could not be sent yet
        self.incidents = IncidentNamer()
        self._next_snapshot = 0.0
        self._sequence = 0
        self._own_record_bytes = 0  # of the adapter's
        self._began = time.monotonic()
        self.dropped_rows = 0  # violations that did not fit into the backlog

    @property
    def dropped_messages(self) -> int:
        """Messages the link refused."""
        return self._link.dropped if self._link else 0

    def peer_age(self, now: float) -> float | None:
        """Seconds since the service's last message, or since attach.

        None without a link, and while a service that was never heard may still be starting.
        """
        if self._link is None:
            return None
        age, attached = self._link.peer_age_seconds(now), now - self._began
        if age is None:
            return attached if attached > SERVICE_START_SECONDS else None
        return age

    def receive(self) -> list[Command]:
        """Commands that arrived since the last call."""
        return self._link.receive() if self._link else []

    def send(self, message: EngineMessage) -> bool:
        """Hand a message to the link; False = dropped there, or no link."""
        return self._link is not None and self._link.send(message)

    def send_hello(self, own_record_bytes: int | None = None) -> None:
        """Send identity, groups, settings and versions.

        `own_record_bytes`: device memory of records that the adapter keeps itself; None = as it was.
        """
        if own_record_bytes is not None:
            self._own_record_bytes = own_record_bytes
        self.send(
            Hello(
                identity=self.identity,
                mode=self._config.mode,
                backend=self._state.backend.value,
                engine_version=self._engine_version,
                groups=tuple(group.info() for group in self._state.groups),
                record_bytes=self._state.record_bytes + self._own_record_bytes,
                allocated_bytes=self._state.kv_coverage.bytes,
                settings=masked(self._config),
                versions=versions(),
                expected_ranks=parse_ranks(self._config.expected_ranks),
                node=self._node,
                gpu=self._gpu,
                model=self._model,
            )
        )

    def send_violations(self, found: list[Violation]) -> None:
        """Send these violations and the backlog; what the link refuses stays in the backlog."""
        self._findings.extend(found)
        self.dropped_rows += max(0, len(self.backlog) + len(found) - BACKLOG)
        self.backlog.extend(found)
        if self.backlog and self.send(self._violations(self.backlog)):
            self.backlog.clear()

    def introduce(self) -> None:
        """Send Hello, and the findings that a service which asks for it may have missed."""
        self.send_hello()
        if self._findings:
            self.send(self._violations(self._findings))

    def acknowledged(self) -> None:
        """An operator has seen the findings so far."""
        self._findings.clear()
        self.incidents.acknowledged()

    def _violations(self, rows: Iterable[Violation]) -> Violations:
        return Violations(identity=self.identity, rows=tuple(rows), incidents=self.incidents.names)

    def send_sweep(self, progress: SweepProgress) -> None:
        """Report that a sweep started or ended."""
        self.send(SweepReport(identity=self.identity, progress=progress))

    def send_drill(self, finding: DrillFinding) -> None:
        """Report how a drill ended."""
        self.send(DrillReport(identity=self.identity, finding=finding))

    def send_heals(self, heals: Sequence[Heal]) -> None:
        """Report what healing did."""
        self.send(Heals(identity=self.identity, rows=tuple(heals)))

    def snapshot_due(self, now: float) -> bool:
        """Whether a snapshot is due; starts the next interval. Also without a link, for the state log."""
        if now < self._next_snapshot:
            return False
        self._next_snapshot = now + self._config.snapshot_seconds
        return True

    @property
    def snapshots(self) -> int:
        """Snapshots made so far."""
        return self._sequence

    def next_snapshot_sequence(self) -> int:
        """Number of the next snapshot, from 0."""
        self._sequence += 1
        return self._sequence - 1

    def watch(self, run: RunState, in_step: Callable[[], bool]) -> None:
        """Let the link's own thread report steps that last."""
        if self._link is not None:
            self._link.background = StepWatch(self.identity, run, in_step, lambda: self.snapshots).report

    def flush(self) -> None:
        """Wait up to a second until what was sent leaves without this thread."""
        if self._link is not None:
            self._link.flush(_FLUSH_SECONDS)

    def close(self, final: Snapshot) -> None:
        """Send Goodbye with the final snapshot and close the link, which has a second to send it."""
        if self._link is not None:
            self.send(Goodbye(identity=self.identity, final=final))
            self._link.close(1.0)
            self._link = None


def versions() -> dict[str, str]:
    """Versions of canary_obs, torch and Python; of CUDA and its driver where there are any."""
    # torch's version is a str subclass, which msgpack refuses.
    found = {"canary_obs": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = str(torch.version.cuda)
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["driver"] = driver.read_text().splitlines()[0].strip()
    return found


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's name and index."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} cuda:{device.index or 0}"
    return device.type
