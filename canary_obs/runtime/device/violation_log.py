"""Reads rows of the device's violation log as Violations, each once, and marks those found before."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
from torch import Tensor

from canary_kernels import layout
from canary_obs.records import Violation
from canary_obs.runtime.device.findings import Findings
from canary_obs.runtime.device.state import DeviceState
from canary_obs.slot_facts import request_name
from canary_obs.vocabulary import Part, Phase, Reason

# Chains and digests reveal token ids to anyone who tries all tokens of a vocabulary.
_PRIVATE = frozenset({Reason.CHAIN, Reason.TOKEN, Reason.WRITE_TOKEN})

_BEFORE_LOADS = 65536  # findings remembered, at most


class _Lane(NamedTuple):
    """Unread events of one lane."""

    group: int
    number: int
    rows: list[list[int]]  # oldest first
    lost: int  # events whose rows were overwritten


class ViolationLog:
    """Knows which events of each lane were read, and counts those overwritten before that.

    Damage that stays is detected again by every check that meets it. A finding is what a row says of a slot
    (group, slot, part, reason, expected, actual); later rows of it, whatever check they are of, are
    redetections. So are all but the first of consecutive slots of a request that fail one check of a forward.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        reveal_tokens: bool,
        remembered_steps: int = 512,
        sweep_id: Callable[[], str | None] = lambda: None,
        forget_seconds: float = 0.0,
    ) -> None:
        """`sweep_id` names the sweep that violations of phase `sweep` belong to.

        `forget_seconds`: after so long a finding is new again; 0 = every row is a finding.
        """
        self._state, self._groups = state, state.groups
        self._reveal, self._sweep_id = reveal_tokens, sweep_id
        self._read = [[0] * layout.NUM_LANES for _ in state.groups]
        self.events_read = 0
        self._findings, self._one_by_one = Findings(forget_seconds), forget_seconds == 0
        self._redetected = [[0] * layout.NUM_LANES for _ in state.groups]
        self._requests: OrderedDict[int, Sequence[str]] = OrderedDict()
        self._remembered = remembered_steps
        # Events of HEAD lanes that are of what a load was about to write over; the latest ones.
        self._before_loads: OrderedDict[tuple[str, Reason, int], None] = OrderedDict()
        self.dropped = 0  # events whose rows were overwritten before they were read

    def remember_requests(self, step: int, request_ids: Sequence[str]) -> None:
        """Remember the request ids of a step, for the rows of its violations."""
        self._requests[step] = tuple(request_ids)
        if len(self._requests) > self._remembered:
            self._requests.popitem(last=False)

    def requests_at(self, step: int) -> Sequence[str]:
        """Request ids of a step; none once `remembered_steps` others followed."""
        return self._requests.get(step, ())

    def is_before_load(self, violation: Violation) -> bool:
        """Whether it is of what a load was about to write over, and not of what a forward was."""
        key = violation.group, violation.reason, violation.event
        return violation.phase is Phase.HEAD and key in self._before_loads

    def has_unread(self, events: int) -> bool:
        """Whether fewer than `events` violations were read so far."""
        return events > self.events_read

    def counts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Findings and redetections among the events read so far, each [groups][NUM_LANES]."""
        findings = [
            [read - again for read, again in zip(*lanes, strict=True)]
            for lanes in zip(self._read, self._redetected, strict=True)
        ]
        return findings, [list(lanes) for lanes in self._redetected]

    @property
    def findings(self) -> int:
        """All findings so far; events that were overwritten count as such."""
        return self.events_read - sum(map(sum, self._redetected))

    def read(self, values: Tensor, step: int) -> list[Violation]:
        """Unread events of a host copy of counters and log, oldest first within each lane."""
        counters = values[: self._state.counter_words].view(-1, layout.COUNTER_WORDS).tolist()
        log = self._state.log_of(values)
        unread: list[_Lane] = []
        for group in range(log.shape[0]):
            for number in range(layout.NUM_LANES):
                count, done = counters[group][number], self._read[group][number]
                if count > done:
                    self._read[group][number] = count
                    self.events_read += count - done
                    held = log[group, number]  # a lane may have thousands of rows
                    events = held[:, layout.ROW_EVENT]
                    rows: list[list[int]] = held[(events > done) & (events <= count)].tolist()
                    rows.sort(key=lambda row: row[layout.ROW_EVENT])
                    unread.append(_Lane(group, number, rows, count - done - len(rows)))
        known = self._known(unread)
        now = time.time_ns()
        return [violation for lane in unread for violation in self._violations(lane, known, step, now)]

    def _known(self, lanes: list[_Lane]) -> set[tuple[int, int, int]]:
        """Group, lane and event of rows whose finding was there before, in the order of the launches."""
        stamped = [(row[layout.ROW_STEP], lane, row) for lane in lanes for row in lane.rows]
        stamped.sort(key=itemgetter(0))
        return {
            (lane.group, lane.number, row[layout.ROW_EVENT])
            for _, lane, row in stamped
            if not self._findings.is_new((lane.group, lane.number % layout.NUM_REASONS, *_words(row)))
        }

    def _violations(
        self, lane: _Lane, known: set[tuple[int, int, int]], step: int, now: int
    ) -> list[Violation]:
        name = self._groups[lane.group].name
        found = [self._violation(row, name, lane.number, step, now) for row in lane.rows]
        again = [(lane.group, lane.number, row[layout.ROW_EVENT]) in known for row in lane.rows]
        found = _runs(found, lane.rows, again, together=not self._one_by_one)
        repeated, lost = sum(violation.redetection for violation in found), lane.lost
        if repeated == len(found) > 0:  # a flood of what is known: so was what it has overwritten
            repeated, lost = repeated + lost, 0
        self._redetected[lane.group][lane.number] += repeated
        self.dropped += lost
        return found

    def _violation(self, row: list[int], group: str, number: int, step: int, now: int) -> Violation:
        phase = Phase.from_code(number // layout.NUM_REASONS)
        reason = Reason.from_code(number % layout.NUM_REASONS)
        hidden = reason in _PRIVATE and not self._reveal
        row_step = row[layout.ROW_STEP] >> layout.TICK_BITS
        arrivals = self._state.arrivals
        if phase is Phase.HEAD and arrivals.is_before(row[layout.ROW_STEP]):
            self._before_loads[group, reason, row[layout.ROW_EVENT]] = None
            if len(self._before_loads) > _BEFORE_LOADS:
                self._before_loads.popitem(last=False)
        ordinal, part = row[layout.ROW_REQUEST], row[layout.ROW_PART]
        request = arrivals.request_of(row[layout.ROW_STEP])  # of a comparison on arrival
        if ordinal >= 0:
            requests = self.requests_at(row_step)
            request = requests[ordinal % len(requests)] if requests else None
        return Violation(
            phase=phase,
            reason=reason,
            group=group,
            part=None if part == layout.Part.IDENTITY else Part.from_code(part),
            step=row_step,
            event=row[layout.ROW_EVENT],
            slot=row[layout.ROW_SLOT],
            position=row[layout.ROW_POSITION] if row[layout.ROW_POSITION] >= 0 else None,
            request=None if request is None else request_name(request),
            expected=None if hidden else f"{layout.unsigned(row[layout.ROW_EXPECTED]):#x}",
            actual=None if hidden else f"{layout.unsigned(row[layout.ROW_ACTUAL]):#x}",
            lag_steps=step - row_step,
            time_ns=now,
            sweep_id=self._sweep_id() if phase is Phase.SWEEP else None,
            peer=arrivals.peer_of(row[layout.ROW_STEP]),
        )


def _words(row: list[int]) -> tuple[int, ...]:
    """What a row says of a slot, whichever check it is of."""
    return row[layout.ROW_SLOT], row[layout.ROW_PART], row[layout.ROW_EXPECTED], row[layout.ROW_ACTUAL]


def _runs(
    found: list[Violation], rows: list[list[int]], again: list[bool], *, together: bool
) -> list[Violation]:
    """Violations with `redetection` set, and `slots` of those that stand for the ones after them."""
    marked: list[Violation] = []
    first = -1  # of the run that the previous violation belongs to; -1 = none
    for number, (violation, row, seen) in enumerate(zip(found, rows, again, strict=True)):
        of_request = together and violation.part is None and row[layout.ROW_REQUEST] >= 0
        follows = of_request and first >= 0 and not seen and _next_in_run(rows[number - 1], row)
        marked.append(msgspec.structs.replace(violation, redetection=seen or follows))
        if follows:
            marked[first] = msgspec.structs.replace(marked[first], slots=marked[first].slots + 1)
        else:
            first = number if of_request and not seen else -1
    return marked


def _next_in_run(before: list[int], row: list[int]) -> bool:
    same = (layout.ROW_REQUEST, layout.ROW_STEP)
    return (
        all(before[word] == row[word] for word in same)
        and row[layout.ROW_POSITION] == before[layout.ROW_POSITION] + 1
    )
