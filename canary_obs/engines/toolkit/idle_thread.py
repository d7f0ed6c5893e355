"""Runs the canary's idle work for an engine that has no idle loop of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

QUIET_SECONDS = 0.05  # without a step and without device work for this long: idle
_POLL_SECONDS = 0.02
_STEPPING_POLL_SECONDS = 0.2  # longer, because each poll may make a step wait for the interpreter lock
_MORE_WORK_SECONDS = 0.001


class IdleThread:
    """Calls `idle` while the engine holds no lock, ran no step and kept no device busy for QUIET_SECONDS.

    `busy` is asked as well as the time of the last step: with asynchronous scheduling a long prefill still
    runs after its step has returned, and the next step may follow right after it.
    """

    def __init__(
        self,
        lock: threading.Lock,
        idle: Callable[[], bool],
        context: Callable[[], AbstractContextManager[object]],
        busy: Callable[[], bool],
    ) -> None:
        """`lock` is held during each engine step. `idle` is called inside `context()`; True = more to do.

        `busy`: whether the device still runs work of the engine's stream.
        """
        self._lock, self._idle, self._context, self._busy = lock, idle, context, busy
        self._stop = threading.Event()
        self.last_step = time.monotonic()  # set by the engine's thread at the end of each step
        self.device_busy = False  # as seen last
        self.raised: BaseException | None = None  # by `idle` in mode `raise`; the next step raises it
        self._thread = threading.Thread(target=self._run, name="canary-idle", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the call that is under way. The caller must not hold the lock."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        pause, last_busy = _POLL_SECONDS, 0.0
        idle_since_step = 0.0  # the step after which `idle` was called: a device busy then runs its work
        while not self._stop.wait(pause):
            pause = _POLL_SECONDS
            now, last_step = time.monotonic(), self.last_step
            quiet = now - last_step >= QUIET_SECONDS
            if not quiet:
                pause = _STEPPING_POLL_SECONDS
            if not quiet or not self._lock.acquire(blocking=False):
                continue
            try:
                self.device_busy = self._busy()
                if self.device_busy:  # asked under the lock: a step may have run since `quiet` was found
                    last_busy = last_busy if idle_since_step == last_step else now
                    continue
                if now - last_busy < QUIET_SECONDS:
                    continue
                idle_since_step = last_step
                with self._context():
                    pause = _MORE_WORK_SECONDS if self._idle() else _POLL_SECONDS
            except Exception as error:  # noqa: BLE001 - mode `raise`: the next step raises it on the engine's thread
                self.raised = error
            finally:
                self._lock.release()
