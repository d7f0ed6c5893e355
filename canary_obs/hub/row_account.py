"""Which of a process' violations an operator has acknowledged, by the incident they belong to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from canary_obs.records import Violation

_ROWS_KNOWN = 4096
_INCIDENTS_KNOWN = 256
_OLDER = ""  # the incidents before them


@dataclass(slots=True)
class RowAccount:
    """Violations of one process that arrived one by one. Not thread-safe."""

    received: int = 0
    unseen: Counter[str] = field(default_factory=Counter)  # by incident, not acknowledged
    seen: Counter[str] = field(default_factory=Counter)  # by incident, acknowledged
    # The latest of them: group, phase, reason, event.
    _known: OrderedDict[tuple[object, ...], None] = field(default_factory=OrderedDict)

    def new_rows(self, rows: tuple[Violation, ...]) -> tuple[Violation, ...]:
        """Violations that were not received before: a rank repeats them when it is asked for its Hello."""
        new = []
        for row in rows:
            key = (row.group, row.phase, row.reason, row.event)
            if key not in self._known:
                self._known[key] = None
                new.append(row)
        while len(self._known) > _ROWS_KNOWN:
            self._known.popitem(last=False)
        self.received += len(new)
        return tuple(new)

    def file(self, incident: str, rows: int) -> None:
        """New rows belong to this incident."""
        self.unseen[incident] += rows
        _bound(self.unseen)

    def acknowledge(self, later: Mapping[str, int]) -> None:
        """Everything was seen, but for this many rows of each incident."""
        for incident, rows in list(self.unseen.items()):
            self._see(incident, rows - min(rows, later.get(incident, 0)))

    def acknowledge_incident(self, incident: str) -> int:
        """All rows of one incident were seen; returns how many were not before."""
        rows = self.unseen[incident]
        self._see(incident, rows)
        return rows

    def undo(self, incident: str) -> None:
        """The rows of one incident count as not seen."""
        if rows := self.seen.pop(incident, 0):
            self.unseen[incident] += rows

    def _see(self, incident: str, rows: int) -> None:
        self.unseen[incident] -= rows
        if not self.unseen[incident]:
            del self.unseen[incident]
        if rows:
            self.seen[incident] += rows
            _bound(self.seen)


def _bound(rows: Counter[str]) -> None:
    """Count the oldest incidents together: they can be acknowledged with all others, and not alone."""
    while len(rows) > _INCIDENTS_KNOWN:
        oldest = next(incident for incident in rows if incident != _OLDER)
        rows[_OLDER] += rows.pop(oldest)
