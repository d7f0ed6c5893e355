"""Tells the service what this rank knows: hello, snapshots, violations, sweeps, goodbye."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from operator import add
from pathlib import Path

import torch

from canary_kernels import layout
from canary_obs import __version__
from canary_obs.config import CanaryConfig, masked
from canary_obs.records import (
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
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import PHASES, REASONS
from canary_obs.transport.links import EngineLink
from canary_obs.vocabulary import Cause, Phase, Reason

_BACKLOG = 1024
_FLUSH_SECONDS = 1.0
_CAUSES = tuple(Cause[cause.name] for cause in layout.Unverified)


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
        self.backlog: deque[Violation] = deque(maxlen=_BACKLOG)  # violations that could not be sent yet
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
        self.dropped_rows += max(0, len(self.backlog) + len(found) - _BACKLOG)
        self.backlog.extend(found)
        if self.backlog and self._send(Violations(identity=self.identity, rows=tuple(self.backlog))):
            self.backlog.clear()

    def tell(self, message: Snapshot | Evidence | DrillReport) -> None:
        """Report, or answer a question."""
        self._send(message)

    def sweep(self, progress: SweepProgress) -> None:
        """A sweep started or ended."""
        self._send(SweepReport(identity=self.identity, progress=progress))

    def due(self, now: float) -> bool:
        """Whether it is time for the next snapshot; also without a link: the engine's log tells the state."""
        if now < self._next_snapshot:
            return False
        self._next_snapshot = now + self._config.snapshot_seconds
        return True

    def next_sequence(self) -> int:
        """The number of the next snapshot."""
        self._sequence += 1
        return self._sequence - 1

    def flush(self) -> None:
        """What was sent leaves, whatever becomes of this thread."""
        if self._link is not None:
            self._link.flush(_FLUSH_SECONDS)

    def goodbye(self, final: Snapshot) -> None:
        """The last word; gives the link a second to carry it."""
        if self._link is not None:
            self._send(Goodbye(identity=self.identity, final=final))
            self._link.close(1.0)
            self._link = None

    def _send(self, message: EngineMessage) -> bool:
        return self._link is not None and self._link.send(message)


def counter_rows(counted: Sequence[int], beside: Sequence[int]) -> list[list[int]]:
    """[groups][COUNTER_WORDS] of two lists [groups * COUNTER_WORDS].

    What was counted beside the engine's stream is added, but for its violations: those are suspicions.
    """
    # Lists: the engine's thread pays for this four times a second, and every call of torch costs more.
    width, lanes = layout.COUNTER_WORDS, layout.NUM_LANES
    return [
        [
            *counted[start : start + lanes],
            *map(add, counted[start + lanes : start + width], beside[start + lanes : start + width]),
        ]
        for start in range(0, len(counted), width)
    ]


def named_counters(row: Sequence[int]) -> GroupCounters:
    """What the words of a row ([COUNTER_WORDS]) mean."""
    # By zip and slices: a third of what indexing takes.
    phases, causes = len(PHASES), len(_CAUSES)
    runs, verified, hashed = layout.COUNT_RUNS, layout.COUNT_VERIFIED, layout.COUNT_HASHED
    first, last = layout.COUNT_UNVERIFIED, layout.COUNT_WRITTEN
    return GroupCounters(
        runs=dict(zip(PHASES, row[runs : runs + phases], strict=True)),
        verified=dict(zip(PHASES, row[verified : verified + phases], strict=True)),
        hashed=dict(zip(PHASES, row[hashed : hashed + phases], strict=True)),
        unverified={cause: sum(row[first + code : last : causes]) for code, cause in enumerate(_CAUSES)},
        written=row[layout.COUNT_WRITTEN],
        completed=row[layout.COUNT_COMPLETED],
        violations=_named_violations(tuple(row[:runs])),
    )


@lru_cache(maxsize=64)
def _named_violations(lanes: tuple[int, ...]) -> dict[Phase, dict[Reason, int]]:
    """Kept from snapshot to snapshot, as they hardly ever change; nobody may change what this returns."""
    reasons = len(REASONS)
    starts = range(0, len(lanes), reasons)
    return {
        phase: dict(zip(REASONS, lanes[start : start + reasons], strict=True))
        for phase, start in zip(PHASES, starts, strict=True)
    }


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
