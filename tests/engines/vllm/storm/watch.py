"""Samples a rank's verdict from another thread, as an operator would see it."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_GRACE_SECONDS = 3.0  # after mark_ready
_PERIOD_SECONDS = 0.2
_SCRAPE_SECONDS = 3.0
_SERVICE_SECONDS = 15.0  # after mark_ready: its process starts beside the engine
_PROBE = "the storm listens"
_LOGGER = "canary_obs"
_STATE = re.compile(r'kv_canary_service_state\{.*state="(\w+)".*\} 1\.0$')


@dataclass
class Seen:
    """What was seen so far."""

    samples: int = 0
    seconds: float = 0.0  # from the end of the grace, or the start if that was later, to the end
    longest_gap: float = 0.0  # seconds between two samples, or to the start or the end
    scrapes: int = 0  # since the service was `ok` for the first time, or should have been
    service_after: float | None = None  # seconds after the rank was ready when the service was `ok`
    states: dict[str, int] = field(default_factory=dict)  # samples by state, after the grace
    service_states: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)  # the first samples that were not allowed
    warnings: list[str] = field(default_factory=list)  # WARNING records of canary_obs
    probes: int = 0  # of the two warnings that are logged to see that warnings are heard
    errors: list[str] = field(default_factory=list)  # of the watch itself


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
        self._ready_at = ready_at
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm-watch", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        logging.getLogger(_LOGGER).addHandler(self)
        self._probe()
        self._from = max(self._from, time.monotonic())
        self._sampled_at = self._from
        self._thread.start()

    def stop(self) -> Seen:
        """End, after a last sample."""
        self._stop.set()
        self._thread.join(10 * _SCRAPE_SECONDS)
        if self._thread.is_alive():
            self._failed("the watch does not end")
        self.seen.seconds = max(0.0, time.monotonic() - self._from)
        self._sample()
        self._probe()
        logging.getLogger(_LOGGER).removeHandler(self)
        return self.seen

    def emit(self, record: logging.LogRecord) -> None:
        """A WARNING or worse of canary_obs."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError) as error:
            text = f"{record.msg}: {error}"
        if text == _PROBE:
            self.seen.probes += 1
        elif len(self.seen.warnings) < 50:
            self.seen.warnings.append(text[:500])

    def _probe(self) -> None:
        logging.getLogger(f"{_LOGGER}.storm").warning(_PROBE)

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            if time.monotonic() >= self._from:
                self._sample()
                if turn % 10 == 0:
                    self._guarded(self._scrape)
                turn += 1
            self._stop.wait(_PERIOD_SECONDS)

    def _sample(self) -> None:
        now = time.monotonic()
        self.seen.longest_gap = max(self.seen.longest_gap, now - self._sampled_at)
        self._sampled_at = max(now, self._from)
        self._guarded(self._look)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a watch that ends in silence would call every storm clean
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, text: str) -> None:
        if len(self.seen.errors) < 20:
            self.seen.errors.append(f"{time.monotonic() - self._from:.1f} s: {text}"[:500])

    def _look(self) -> None:
        state, reasons = self._verdict()
        self.seen.samples += 1
        self._note(str(state), "; ".join(reasons), self.seen.states)

    def _scrape(self) -> None:
        if self._url is None:
            return
        found, why = ["unreachable"], ""
        try:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_SCRAPE_SECONDS) as answer:
                lines = answer.read().decode().splitlines()
            found = [hit[1] for line in lines if (hit := _STATE.match(line))]
        except OSError as error:
            why = str(error)
        after = time.monotonic() - self._ready_at
        if self.seen.service_after is None:
            if found == ["ok"]:
                self.seen.service_after = after
            elif after < _SERVICE_SECONDS and found in (["unreachable"], ["off"], []):
                return
        self.seen.scrapes += 1
        if not set(found) <= set(self._allowed):
            why = why or self._service_reasons()
        for state in found:
            self._note(state, f"service: {why}", self.seen.service_states)

    def _service_reasons(self) -> str:
        try:
            with urllib.request.urlopen(f"{self._url}/canary/status", timeout=_SCRAPE_SECONDS) as answer:
                status = json.load(answer)
        except (OSError, ValueError) as error:
            return str(error)
        ranks = [reason for rank in status["ranks"] for reason in rank["reasons"]]
        return "; ".join([*status["reasons"], *ranks])

    def _note(self, state: str, why: str, counts: dict[str, int]) -> None:
        counts[state] = counts.get(state, 0) + 1
        if state not in self._allowed and len(self.seen.bad) < 50:
            self.seen.bad.append(f"{time.monotonic() - self._from:.1f} s: {state}: {why}")
