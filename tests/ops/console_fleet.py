"""A service with 64 ranks that answer commands as engines do, and a browser that signs in to its console."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

from canary_obs.commands import Pause, Resume, StartDrill
from canary_obs.config import ServiceConfig
from canary_obs.records import CancelSweep, Command, Identity, StartSweep, SweepReport, Violations
from canary_obs.serve import ServiceThread
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import State, SweepStatus
from tests.service.fakes import counters, drilled, hello, identity, progress, snapshot, violation

RANKS = 64
WRITER, OPERATOR, READER = (f"{name}-0123456789abcdef" for name in ("writer", "operator", "reader"))
TOKENS = f"""
[oncall]
token = "{WRITER}"
scopes = ["read", "operate", "inject"]
[operator]
token = "{OPERATOR}"
scopes = ["read", "operate"]
[viewer]
token = "{READER}"
scopes = ["read"]
"""


class ConsoleFleet:
    """64 ranks in eight engine instances. Sweeps advance when told to; the rest is answered at once."""

    def __init__(self, folder: Path) -> None:
        tokens = folder / "tokens.toml"
        tokens.write_text(TOKENS)
        tokens.chmod(0o600)
        config = ServiceConfig(
            port=0, tokens_file=str(tokens), drill_enabled=True, snapshot_stale_seconds=600.0,
            log_file=str(folder / "log"), orders_per_minute=1000,
        )  # fmt: skip
        self.service = ServiceThread(config, link=LocalLink())
        self.hub, self.url, self.sweep = self.service.hub, self.service.url, ""
        self.finishes = False  # sweeps, at once
        self.received: list[tuple[Identity, Command]] = []
        self._steps: Counter[Identity] = Counter()
        self._found: Counter[Identity] = Counter()
        self.ranks = [identity(number % 8, instance=f"gpu-{number // 8}") for number in range(RANKS)]
        for who in self.ranks:
            self.join(who)

    def join(self, who: Identity) -> None:
        self.send(who, hello(who))
        self.advance(who, perturbations={})

    def send(self, who: Identity, message: Any) -> None:
        self.hub.ingest(message, lambda command: self._execute(who, command))

    def advance(self, who: Identity, **changes: Any) -> None:
        """The next snapshot of a rank: it counts what was found, and is ok unless the changes say other."""
        self._steps[who] += 1
        step = self._steps[who]
        plain = {"groups": {"full": counters(step, self._found[who])}, "perturbations": {}}
        self.send(who, snapshot(who, step, **plain | changes))

    def _execute(self, who: Identity, command: Command) -> None:
        self.received.append((who, command))
        if isinstance(command, StartSweep):
            self.sweep = command.id
            if self.finishes:
                self.report(who, SweepStatus.PASSED, 100)
        elif isinstance(command, CancelSweep):
            threading.Thread(target=self.report, args=(who, SweepStatus.CANCELLED, 30)).start()
        elif isinstance(command, StartDrill):
            self.send(who, drilled(who, command.id))
        elif isinstance(command, Pause):
            self.advance(who, paused=True, state=State.DEGRADED, state_reasons=("paused",))
        elif isinstance(command, Resume):
            self.advance(who)

    def report(self, who: Identity, status: SweepStatus, checked: int) -> None:
        """How far the latest sweep is on a rank, of 100 slots."""
        self.send(who, SweepReport(identity=who, progress=progress(self.sweep, status, checked=checked)))

    def find(self, who: Identity, **changes: Any) -> str:
        """A finding of a rank; returns its incident's id."""
        self.send(who, Violations(identity=who, rows=(violation(**changes),)))
        self._found[who] += 1
        self.advance(who, state=State.VIOLATED, state_reasons=("1 violations",))
        return self.hub.violations()[0].incident

    def commanded(self, kind: type[Command]) -> list[str]:
        """Which ranks have received a command of a kind, in order."""
        return [f"{who.instance}/{who.rank}" for who, command in self.received if isinstance(command, kind)]


def sign_in(page: Any, url: str, token: str = WRITER, path: str = "/") -> None:
    """Through the form, as a person would."""
    page.goto(url + path)
    page.get_by_label("Token of the service").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(url + path)
    page.get_by_role("button", name="Sign out").wait_for()
