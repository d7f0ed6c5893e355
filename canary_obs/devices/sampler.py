"""A thread of the service that samples the GPUs of its node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from canary_obs.devices import amd, nvml
from canary_obs.devices.amd_health import AmdHealth
from canary_obs.devices.health import DeviceHealth
from canary_obs.devices.nvml import NoLibrary
from canary_obs.devices.nvml_health import NvmlHealth

log = logging.getLogger("canary_obs")

INTERVAL_SECONDS = 10.0
KEPT_SECONDS = 60.0  # a sample that is older says nothing about now: a driver may hang for good
_WAIT_SECONDS = 0.5  # for Xids, between looks at whether to stop
_CLOSE_SECONDS = 2.0  # a driver that hangs does not hold up the service's end


class DeviceSampler:
    """Reads in its own thread, so that neither a scrape nor a check waits for a driver."""

    def __init__(
        self,
        on_fault: Callable[[Exception], None],
        *,
        interval: float = INTERVAL_SECONDS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._on_fault, self._interval, self._wall = on_fault, interval, wall
        self._latest: tuple[DeviceHealth, ...] = ()
        self._stop, self.sampled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-devices", daemon=True)
        self._thread.start()

    def latest(self) -> tuple[DeviceHealth, ...]:
        """The newest sample of each GPU that is younger than KEPT_SECONDS."""
        now = self._wall()
        return tuple(health for health in self._latest if now - health.time < KEPT_SECONDS)

    def close(self) -> None:
        """Stop sampling; idempotent."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            with ExitStack() as opened:
                health = _open(opened)
                if health is None:
                    return
                opened.callback(health.close)
                while not self._stop.is_set():
                    self._latest = health.sample(self._wall)
                    self.sampled.set()
                    self._wait(health)
        except Exception as error:  # noqa: BLE001 - the service's other work goes on
            self._on_fault(error)

    def _wait(self, health: NvmlHealth | AmdHealth) -> None:
        due = time.monotonic() + self._interval
        while not self._stop.is_set() and (left := due - time.monotonic()) > 0:
            if not health.wait(min(left, _WAIT_SECONDS)):
                self._stop.wait(left)


def _open(opened: ExitStack) -> NvmlHealth | AmdHealth | None:
    """The health of this node's GPUs, of whichever maker; None = no library that knows them."""
    reasons = []
    for library, health in ((nvml.library, NvmlHealth), (amd.library, AmdHealth)):
        try:
            return health(opened.enter_context(library()))
        except NoLibrary as reason:
            reasons.append(str(reason))
    log.info("no device health: %s", "; ".join(reasons))
    return None
