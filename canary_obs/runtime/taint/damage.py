"""One damaged place with its readers, and the messages that report them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from canary_obs.engine_api.healing import Reached
from canary_obs.records import Identity, Tainted, Violation
from canary_obs.runtime.taint.good_checks import GoodTime
from canary_obs.runtime.taint.lives import RUNNING, Lives
from canary_obs.runtime.taint.reading import Readers, Reading
from canary_obs.slot_facts import TaintedRequest
from canary_obs.vocabulary import Completeness

REQUESTS_KEPT = 4096  # of one damage


@dataclass(slots=True, kw_only=True)
class Damage:
    """Its first finding, the last good check before it, and the lives that read it since."""

    number: int
    incident: str
    row: Violation
    good: GoodTime
    cause: str | None  # why its readers are not all known; None = they are
    readings: dict[int, Reading] = field(default_factory=dict)  # by life
    requests: dict[str, TaintedRequest] = field(default_factory=dict)  # as they were reported last
    unsent: set[int] = field(default_factory=set)  # lives whose entry changed
    changed: bool = True  # there is something to send, if only the damage itself
    counted: bool = False  # as one whose readers are not all known
    covers: int = 0  # the damage that its block held before
    rows: set[str] = field(default_factory=set)  # requests whose rows failed the check of a forward
    copied: bool = False  # the cause is that of `doubt_copies`

    @property
    def completeness(self) -> Completeness:
        """Whether all of its readers are known."""
        return Completeness.KNOWN if self.cause is None else Completeness.UNKNOWN

    def add(self, reading: Reading) -> bool:
        """Add a reading; returns whether its life is a new reader."""
        known = self.readings.get(reading.life)
        if known is not None and known.step <= reading.step:
            return False
        if known is None and len(self.readings) >= REQUESTS_KEPT:
            self.doubt(f"more than {REQUESTS_KEPT} requests read it")
            return False
        self.readings[reading.life] = reading
        self.unsent.add(reading.life)
        self.changed = True
        return known is None

    def note(self, lives: Sequence[int]) -> bool:
        """These lives of one request have changed; returns whether it is a reader."""
        read = self.readings.keys() & lives
        self.unsent |= read
        self.changed |= bool(read)
        return bool(read)

    def doubt(self, cause: str) -> None:
        """Its readers are not all known, for this reason; the first one stays."""
        if not self.in_doubt:
            self.cause, self.copied, self.changed = cause, False, True

    def doubt_copies(self, place: str) -> None:
        """KV computed from it may be stored there, for readers that are not known."""
        if self.cause is None:
            self.doubt(f"KV computed from it may be stored in {place}: who loads that is not listed")
            self.copied = True

    @property
    def in_doubt(self) -> bool:
        """Whether a reader may be missing among those that loaded no copy from a lower tier."""
        return self.cause is not None and not self.copied

    def reached(
        self, readers: Readers, slots: Mapping[str, tuple[int, ...]], row: Violation, overwritten: bool
    ) -> Reached:
        """Its readers with what they had given out before, and the slots that hold it.

        `row`: of it, found last. A request that began after the first one may have read what is new.
        """
        before: dict[str, int] = {}
        readings = [*self.readings.values()]
        for reading, first in zip(readings, _first_outputs(readings, readers), strict=True):
            name = readers.lives.names[reading.life]
            # Without a good account of who has read, no token is known to be right. Copies of what was
            # computed from it are loaded later than it was first read, by requests that begin then.
            first = 0 if self.in_doubt else first
            if _is_cured(reading.life, first, readers.lives):
                continue
            before[name] = min(first, before.get(name, first))
        return Reached(row, overwritten, tuple(before.items()), slots)

    def is_all_of(self, group: str, block: int, slots: int) -> bool:
        """Whether it is all the damage that this block of so many slots had, and its readers are known."""
        same = (self.row.group, self.row.slot // slots) == (group, block)
        return same and self.covers == 0 and self.cause is None

    def renumber(self, numbers: dict[int, int]) -> None:
        """Lives have new numbers; those that are forgotten have none."""
        self.readings = {
            new: Reading(new, one.step, one.derived)
            for life, one in self.readings.items()
            if (new := numbers.get(life)) is not None
        }
        self.unsent = {new for life in self.unsent if (new := numbers.get(life)) is not None}

    def resend(self) -> None:
        """Report everything again."""
        self.unsent, self.changed = set(self.readings), True

    def message(self, identity: Identity, readers: Readers, emitted: dict[str, int | None]) -> Tainted:
        """What changed since the last message. `emitted`: tokens so far, of requests that run."""
        rows: dict[str, TaintedRequest] = {}
        readings = [self.readings[life] for life in sorted(self.unsent)]
        for reading, first in zip(readings, _first_outputs(readings, readers), strict=True):
            row = _entry(reading, first, readers, emitted)
            # Of a request that was preempted, the first life that read damage says more.
            earlier = rows.get(row.request) or self.requests.get(row.request)
            rows[row.request] = row if earlier is None else _merged(earlier, row)
        self.requests |= rows
        return Tainted(
            identity=identity, number=self.number, incident=self.incident, group=self.row.group,
            slot=self.row.slot, reason=self.row.reason, phase=self.row.phase, step=self.row.step,
            good_step=self.good.step, good_check=self.good.check, completeness=self.completeness,
            cause=self.cause, time_ns=time.time_ns(), requests=tuple(rows.values()),
        )  # fmt: skip

    def sent(self) -> None:
        """The last message is on its way."""
        self.unsent.clear()
        self.changed = False


def _entry(reading: Reading, first: int, readers: Readers, emitted: dict[str, int | None]) -> TaintedRequest:
    lives: Lives = readers.lives
    life, name = reading.life, lives.names[reading.life]
    latest = life if _is_cured(life, first, lives) else lives.latest(life)
    running = bool(lives.last[latest] == RUNNING)
    total = emitted.get(name) if running else lives.emitted[latest]
    return TaintedRequest(
        request=name, running=running, step=reading.step, derived=reading.derived, first_output=first,
        outputs=None if total is None else max(0, total - first),
    )  # fmt: skip


def _is_cured(life: int, first: int, lives: Lives) -> bool:
    """Whether the life ended before it emitted its token number `first`: what it computed is gone."""
    emitted = lives.emitted[life]
    return bool(lives.last[life] != RUNNING) and emitted is not None and emitted <= first


def _first_outputs(readings: Sequence[Reading], readers: Readers) -> list[int]:
    """Of each: a forward emits the token after the last one that it computes."""
    lives, computed = readers.computed(readings)
    prompts = readers.lives.prompts
    return [
        max(0, before + 1 - prompts[life])
        for life, before in zip(lives.tolist(), computed.tolist(), strict=True)
    ]


def _merged(earlier: TaintedRequest, later: TaintedRequest) -> TaintedRequest:
    cured = earlier.outputs == 0 and not earlier.running
    if cured or earlier.first_output is None or later.first_output is None:
        return later
    first = min(earlier.first_output, later.first_output)
    more = later.first_output - first
    return TaintedRequest(
        request=later.request, running=later.running, step=min(earlier.step, later.step),
        derived=earlier.derived and later.derived, first_output=first,
        outputs=None if later.outputs is None else later.outputs + more,
    )  # fmt: skip
