"""Keeps a worker's canary going while vLLM waits for requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

QUIET_SECONDS = 0.05  # a worker without a step for this long is idle
_PAUSE_SECONDS = 0.02
_STEPPING_PAUSE_SECONDS = 0.2  # each time it looks, a step may have to wait for the interpreter
_BUSY_PAUSE_SECONDS = 0.001


class IdleThread:
    """Calls `idle` while nobody holds the lock, and for QUIET_SECONDS no step came and nothing was `busy`.

    With asynchronous scheduling a long prefill runs on for a while after its step has come, and right after
    its end the next one may come.
    """

    def __init__(
        self,
        lock: threading.Lock,
        idle: Callable[[], bool],
        surroundings: Callable[[], AbstractContextManager[object]],
        busy: Callable[[], bool],
    ) -> None:
        self._lock, self._idle, self._surroundings, self._busy = lock, idle, surroundings, busy
        self._stop = threading.Event()
        self.last_step = time.monotonic()
        self.raised: BaseException | None = None  # what a step must raise in mode `raise`
        self._thread = threading.Thread(target=self._run, name="canary-idle", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End and wait for the last call; must not hold the lock."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        pause, last_busy = _PAUSE_SECONDS, 0.0
        rested_after = 0.0  # the last step after which `idle` was called: what is busy then is its own work
        while not self._stop.wait(pause):
            pause = _PAUSE_SECONDS
            now, last_step = time.monotonic(), self.last_step
            quiet = now - last_step >= QUIET_SECONDS
            if not quiet:
                pause = _STEPPING_PAUSE_SECONDS
            if not quiet or not self._lock.acquire(blocking=False):
                continue
            try:
                if self._busy():  # asked under the lock: a step may have come since it was quiet
                    last_busy = last_busy if rested_after == last_step else now
                    continue
                if now - last_busy < QUIET_SECONDS:
                    continue
                rested_after = last_step
                with self._surroundings():
                    pause = _BUSY_PAUSE_SECONDS if self._idle() else _PAUSE_SECONDS
            except Exception as error:  # noqa: BLE001 - mode `raise`: the next step raises it on the engine's thread
                self.raised = error
            finally:
                self._lock.release()
