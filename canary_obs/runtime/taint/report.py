"""Sends the service which requests read damage, as far as it does not know them yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.healing import Reached
from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.records import Identity, Tainted, Violation
from canary_obs.runtime.device.violation_log import ViolationLog
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.taint.good_checks import GoodChecks
from canary_obs.runtime.taint.lives import RUNNING
from canary_obs.runtime.taint.tracker import TaintTracker
from canary_obs.vocabulary import Completeness, State

SlotStep = Callable[[str, int], int | None]  # group, slot -> forward


class TaintReporter:
    """A rank's tracker and what was reported of it. Never waits: what cannot be sent is sent later."""

    def __init__(
        self,
        adapter: EngineAdapter,
        link: tuple[Identity, Callable[[Tainted], bool]],
        checks: tuple[SlotStep, SlotStep, ViolationLog, ForwardAccount],
        *,
        hits_compared: bool,
    ) -> None:
        """`link`: who sends, and how: it returns whether a message is on its way.

        `checks`: a slot's last write, the patrol's last good pass of it, findings, forwards.
        """
        written, patrolled, self._log, self._forwards = checks
        self._adapter, (self._identity, self.send) = adapter, link
        self._groups = [view.name for view in adapter.groups]
        good = GoodChecks(
            written, patrolled, hits_compared=hits_compared, before_load=self._log.is_before_load
        )
        self.tracker = TaintTracker(
            adapter.block_tables() or {}, _blocks(adapter), good, self._doubts, adapter.copies_stored_in
        )
        self._unknown: Counter[str] = Counter()
        self._dropped = 0  # findings, by now

    def start(self, step: int) -> None:
        """Begin to follow the engine's requests, after forward `step`."""
        self._adapter.show_requests()  # what happened before counts as running now
        self.tracker.start(self._adapter.requests_running(), step)

    def follow(self, shown: ChangedRequests, step: int) -> None:
        """Requests ended after forward `step`, or read more blocks from the next one on."""
        self.tracker.follow(shown, step)

    def found(self, rows: list[Violation], incident: str, step: int) -> None:
        """Findings and redetections were read: report who read what they name."""
        self._adapter.show_requests()
        before, self._dropped = self._dropped, self._log.dropped
        self.tracker.found(rows, incident, step, dropped=self._dropped > before)
        self.report()

    def reached(self) -> list[Reached]:
        """How far the damages have come whose bytes were first found by the last call of `found`."""
        return self.tracker.reached()

    def report(self) -> None:
        """Send what changed."""
        tracker = self.tracker
        if not tracker.pending:
            return
        tracker.pending = False
        lives = tracker.readers.lives
        for damage in tracker.damages.values():
            if not damage.changed:
                continue
            if damage.cause is not None and not damage.counted:
                damage.counted = True
                self._unknown[damage.row.group] += 1
            running = {
                lives.names[life] for life in damage.unsent if lives.last[lives.latest(life)] == RUNNING
            }
            emitted = {name: self._adapter.tokens_emitted(name) for name in running}
            if self.send(damage.message(self._identity, tracker.readers, emitted)):
                damage.sent()
            else:
                tracker.pending = True

    def resend(self) -> None:
        """Report everything again, to a service that has just begun."""
        for damage in self.tracker.damages.values():
            damage.resend()
            self.tracker.pending = True
        self.report()

    def counts(self) -> tuple[dict[str, dict[Completeness, int]], dict[str, int]]:
        """By group: requests that read damage, and damages whose readers are not all known."""
        found = self.tracker.requests
        requests = {
            name: {kind: found[name][kind] if name in found else 0 for kind in Completeness}
            for name in self._groups
        }
        return requests, {name: self._unknown[name] for name in self._groups}

    def _doubts(self) -> str | None:
        blind = [text for state, text in self._forwards.reasons() if state is State.BLIND]
        return blind[0] if blind else None


def _blocks(adapter: EngineAdapter) -> dict[str, int]:
    """Blocks of each numbering, the last one included if it is not whole."""
    tables, sizes = adapter.block_tables() or {}, dict[str, int]()
    for view in adapter.groups:
        if (table := tables.get(view.name)) is not None:
            blocks = -(-view.num_slots // table.block_slots)
            sizes[table.name] = max(sizes.get(table.name, 0), blocks)
    return sizes
