"""Reports an engine that cannot be protected, in the log and to the service."""

from __future__ import annotations

import logging
import os
import threading
import time

from canary_obs import __version__
from canary_obs.config import IN_PROCESS, CanaryConfig, masked
from canary_obs.config_values import parse_ranks
from canary_obs.errors import ConfigurationError
from canary_obs.host_clock import boot_id
from canary_obs.records import (
    Hello,
    Identity,
    Ping,
    PipelineStatus,
    Snapshot,
    StartSweep,
    SweepProgress,
    SweepReport,
)
from canary_obs.transport.links import EngineLink
from canary_obs.transport.sender import open_link
from canary_obs.vocabulary import State, SweepStatus, Trigger

log = logging.getLogger("canary_obs")
_BACKEND = "none"


def log_unprotected(reason: str) -> None:
    """Log why there is no canary."""
    log.error("canary_obs: this engine is not protected: %s", reason)


class Refusal:
    """Reports for a rank without a canary: state `blind` with the reason; sweeps fail."""

    def __init__(self, reason: str, config: CanaryConfig, engine: tuple[str, str]) -> None:
        """`engine`: the engine's name and version."""
        self.reason = reason
        name, version = engine
        self._config, self._version = config, version
        self._identity = Identity(
            engine=name if config.engine == "unknown" else config.engine,
            instance=config.instance,
            rank=config.rank,
            started_ns=time.time_ns(),
            pid=os.getpid(),
            device="unknown",
        )
        self._sequence = 0
        self._link = self._open()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-refusal", daemon=True)
        log_unprotected(reason)
        self._thread.start()

    def _open(self) -> EngineLink | None:
        try:
            return None if self._config.endpoint == IN_PROCESS else open_link(self._config)
        except ConfigurationError as error:
            # A key file that was removed since the engine's start must not end a worker that wakes up.
            log_unprotected(f"the service cannot be reached: {error}")
            return None

    def close(self) -> None:
        """Stop reporting; idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if self._link is None:
            return
        self._link.send(self._hello())
        while True:
            self._link.send(self._snapshot())
            for command in self._link.receive():
                if isinstance(command, Ping) and command.want_hello:
                    self._link.send(self._hello())
                elif isinstance(command, StartSweep):
                    self._fail_sweep(self._link, command)
            if self._stop.wait(self._config.snapshot_seconds):
                self._link.close(0.0)
                return

    def _fail_sweep(self, link: EngineLink, command: StartSweep) -> None:
        progress = SweepProgress(
            id=command.id, trigger=Trigger.DEMAND, status=SweepStatus.FAILED, groups=command.groups,
            data=command.data, total=0, checked=0, skipped={}, violations=0, started_ns=time.time_ns(),
            seconds=0.0, step=0, error=f"not protected: {self.reason}",
        )  # fmt: skip
        link.send(SweepReport(identity=self._identity, progress=progress))

    def _hello(self) -> Hello:
        return Hello(
            identity=self._identity, mode=self._config.mode, backend=_BACKEND,
            engine_version=self._version, groups=(), record_bytes=0, settings=masked(self._config),
            versions={"canary_obs": __version__}, expected_ranks=parse_ranks(self._config.expected_ranks),
        )  # fmt: skip

    def _snapshot(self) -> Snapshot:
        self._sequence += 1
        return Snapshot(
            identity=self._identity, sequence=self._sequence, time_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(), boot_id=boot_id(),
            mode=self._config.mode, backend=_BACKEND, step=0, state=State.BLIND,
            state_reasons=(f"not protected: {self.reason}",), groups={},
            sweep_passes=dict.fromkeys(Trigger, 0), last_sweep_ns=None, sweep=None, patrol=None,
            pipeline=PipelineStatus(lag_steps=0, lag_seconds=0.0, skipped=0), overhead_seconds={},
            step_seconds=0.0, observer_faults={"attach": 1}, violation_events_dropped=0, messages_dropped=0,
            perturbations={}, paused=False,
        )  # fmt: skip
