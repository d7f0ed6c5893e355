"""Tells the service what this rank knows: hello, snapshots, violations, sweeps, goodbye."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from canary_kernels import layout
from canary_obs import __version__
from canary_obs.config import CanaryConfig, masked
from canary_obs.pipeline.delayed_device_host import Sample
from canary_obs.pipeline.mailbox import EngineLink
from canary_obs.records import (
    Cause,
    Command,
    DrillReport,
    EngineMessage,
    Evidence,
    Goodbye,
    GroupCounters,
    Hello,
    Identity,
    Snapshot,
    SweepProgress,
    SweepReport,
    Violation,
    Violations,
)
from canary_obs.runtime.state import DeviceState
from canary_obs.runtime.violation_log import PHASES, REASONS

_BACKLOG = 1024
_CAUSES = {Cause[cause.name]: cause for cause in layout.Unverified}


class Reporter:
    """Owns the link. Never blocks; violations that cannot be sent now wait in a bounded backlog."""

    def __init__(
        self, state: DeviceState, config: CanaryConfig, engine: tuple[str, str], link: EngineLink | None
    ) -> None:
        name, self._engine_version = engine
        self._state, self._config, self._link = state, config, link
        self.identity = Identity(
            engine=name if config.engine == "unknown" else config.engine,
            instance=config.instance,
            rank=config.rank,
            started_ns=time.time_ns(),
            pid=os.getpid(),
            device=device_name(state.clock.device),
        )
        self._backlog: deque[Violation] = deque(maxlen=_BACKLOG)
        self._next_snapshot = 0.0
        self._sequence = 0
        self._began = time.monotonic()
        self.dropped_rows = 0

    @property
    def dropped_messages(self) -> int:
        """Messages the link refused."""
        return self._link.dropped if self._link else 0

    def peer_age(self, now: float) -> float | None:
        """Seconds since the service was heard of; None without a link."""
        if self._link is None:
            return None
        age = self._link.peer_age_seconds(now)
        return now - self._began if age is None else age

    def receive(self) -> list[Command]:
        """Commands that arrived since the last call."""
        return self._link.receive() if self._link else []

    def hello(self) -> None:
        """Say who we are and what is attached."""
        self._send(
            Hello(
                identity=self.identity,
                mode=self._config.mode,
                backend=self._state.backend.value,
                engine_version=self._engine_version,
                groups=tuple(group.info() for group in self._state.groups),
                record_bytes=self._state.record_bytes,
                settings=masked(self._config),
                versions=versions(),
            )
        )

    def violations(self, found: list[Violation]) -> None:
        """Queue violations and send what the link takes."""
        self.dropped_rows += max(0, len(self._backlog) + len(found) - _BACKLOG)
        self._backlog.extend(found)
        if self._backlog and self._send(Violations(identity=self.identity, rows=tuple(self._backlog))):
            self._backlog.clear()

    def tell(self, answer: Evidence | DrillReport) -> None:
        """Answer a question."""
        self._send(answer)

    def sweep(self, progress: SweepProgress) -> None:
        """A sweep started or ended."""
        self._send(SweepReport(identity=self.identity, progress=progress))

    def due(self, now: float) -> bool:
        """Whether it is time for the next snapshot; also without a link: the engine's log tells the state."""
        if now < self._next_snapshot:
            return False
        self._next_snapshot = now + self._config.snapshot_seconds
        return True

    def snapshot(self, build: Callable[[int], Snapshot]) -> Snapshot:
        """Build the next snapshot with its sequence number and send it."""
        snapshot = build(self._sequence)
        self._sequence += 1
        self._send(snapshot)
        return snapshot

    def goodbye(self, final: Snapshot) -> None:
        """The last word; gives the link a second to carry it."""
        if self._link is not None:
            self._send(Goodbye(identity=self.identity, final=final))
            self._link.close(1.0)
            self._link = None

    def _send(self, message: EngineMessage) -> bool:
        return self._link is not None and self._link.send(message)


def group_counters(
    state: DeviceState, sample: Sample | None, beside: Sequence[Sequence[int]] = ()
) -> dict[str, GroupCounters]:
    """The counters of every group in words; zeros before the first copy has arrived.

    `beside` ([groups][COUNTER_WORDS], or nothing) was counted elsewhere and is added.
    """
    # Lists: the engine's thread pays for this four times a second, and every call of torch costs more.
    width = layout.COUNTER_WORDS
    words = [0] * (width * len(state.groups)) if sample is None else sample.words.tolist()
    rows = [words[start : start + width] for start in range(0, len(words), width)]
    if beside:
        rows = [list(map(int.__add__, *both)) for both in zip(rows, beside, strict=True)]
    return {group.name: _counters(row) for group, row in zip(state.groups, rows, strict=True)}


def _counters(row: list[int]) -> GroupCounters:
    unverified = layout.COUNT_UNVERIFIED
    return GroupCounters(
        runs={phase: row[layout.COUNT_RUNS + i] for i, phase in enumerate(PHASES)},
        verified={phase: row[layout.COUNT_VERIFIED + i] for i, phase in enumerate(PHASES)},
        hashed={phase: row[layout.COUNT_HASHED + i] for i, phase in enumerate(PHASES)},
        unverified={
            cause: sum(row[unverified + i * layout.NUM_UNVERIFIED + code] for i in range(layout.NUM_PHASES))
            for cause, code in _CAUSES.items()
        },
        written=row[layout.COUNT_WRITTEN],
        completed=row[layout.COUNT_COMPLETED],
        violations={
            phase: {reason: row[i * layout.NUM_REASONS + j] for j, reason in enumerate(REASONS)}
            for i, phase in enumerate(PHASES)
        },
    )


def versions() -> dict[str, str]:
    """What runs here, down to the driver."""
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
