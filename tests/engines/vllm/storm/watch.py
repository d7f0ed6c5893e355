"""Samples a rank's verdict from another thread, as an operator would see it."""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_GRACE_SECONDS = 3.0  # after mark_ready
_PERIOD_SECONDS = 0.2


@dataclass
class Seen:
    """What was seen so far."""

    samples: int = 0
    scrapes: int = 0
    states: dict[str, int] = field(default_factory=dict)  # samples by state, after the grace
    service_states: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)  # the first samples that were not allowed
    warnings: list[str] = field(default_factory=list)  # WARNING records of canary_obs


class Watch(logging.Handler):
    """Runs from `start` to `stop`; also collects the warnings that canary_obs logs."""

    def __init__(
        self,
        verdict: Callable[[], tuple[str, Sequence[str]]],
        ready_at: float,
        allowed: tuple[str, ...],
        url: str | None,
    ) -> None:
        super().__init__(logging.WARNING)
        self.seen = Seen()
        self._verdict, self._from, self._allowed = verdict, ready_at + _GRACE_SECONDS, allowed
        self._metrics = f"{url}/metrics" if url else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm-watch", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        logging.getLogger("canary_obs").addHandler(self)
        self._thread.start()

    def stop(self) -> Seen:
        """End, after a last sample."""
        self._stop.set()
        self._thread.join()
        logging.getLogger("canary_obs").removeHandler(self)
        return self.seen

    def emit(self, record: logging.LogRecord) -> None:
        """A WARNING or worse of canary_obs."""
        if len(self.seen.warnings) < 50:
            self.seen.warnings.append(record.getMessage()[:500])

    def _run(self) -> None:
        sample = 0
        while not self._stop.is_set():
            if time.monotonic() >= self._from:
                self._sample()
                if self._metrics is not None and sample % 10 == 0:
                    self._scrape(self._metrics)
                sample += 1
            self._stop.wait(_PERIOD_SECONDS)
        self._sample()

    def _sample(self) -> None:
        state, reasons = self._verdict()
        self.seen.samples += 1
        self._note(str(state), "; ".join(reasons), self.seen.states)

    def _scrape(self, url: str) -> None:
        try:
            with urllib.request.urlopen(url, timeout=5.0) as answer:
                lines = answer.read().decode().splitlines()
        except OSError as error:
            self._note("unreachable", str(error), self.seen.service_states)
            return
        self.seen.scrapes += 1
        for line in lines:
            if line.startswith("kv_canary_service_state{") and line.endswith(" 1.0"):
                self._note(line.split('state="')[1].split('"')[0], "service", self.seen.service_states)

    def _note(self, state: str, why: str, counts: dict[str, int]) -> None:
        counts[state] = counts.get(state, 0) + 1
        if state not in self._allowed and len(self.seen.bad) < 50:
            self.seen.bad.append(f"{time.monotonic() - self._from:.1f} s: {state}: {why}")
