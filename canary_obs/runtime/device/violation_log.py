"""Reads rows of the device's violation log as Violations, each once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from canary_kernels import layout
from canary_obs.records import Violation
from canary_obs.runtime.device.state import DeviceState
from canary_obs.vocabulary import Part, Phase, Reason

# Chains and digests reveal token ids to anyone who tries all tokens of a vocabulary.
_PRIVATE = frozenset({Reason.CHAIN, Reason.TOKEN, Reason.WRITE_TOKEN})


class ViolationLog:
    """Knows which events of each lane were read, and counts those overwritten before that."""

    def __init__(
        self,
        state: DeviceState,
        *,
        reveal_tokens: bool,
        remembered_steps: int = 512,
        sweep_id: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`sweep_id` names the sweep that violations of phase `sweep` belong to."""
        self._state, self._groups = state, state.groups
        self._reveal, self._sweep_id = reveal_tokens, sweep_id
        self._read = [[0] * layout.NUM_LANES for _ in state.groups]
        self._events_read = 0
        self._requests: OrderedDict[int, Sequence[str]] = OrderedDict()
        self._remembered = remembered_steps
        self.dropped = 0  # events whose rows were overwritten before they were read

    def remember_requests(self, step: int, request_ids: Sequence[str]) -> None:
        """Remember the request ids of a step, for the rows of its violations."""
        self._requests[step] = tuple(request_ids)
        if len(self._requests) > self._remembered:
            self._requests.popitem(last=False)

    def requests_at(self, step: int) -> Sequence[str]:
        """Request ids of a step; none once `remembered_steps` others followed."""
        return self._requests.get(step, ())

    def has_unread(self, events: int) -> bool:
        """Whether fewer than `events` violations were read so far."""
        return events > self._events_read

    def read(self, values: Tensor, step: int) -> list[Violation]:
        """Unread events of a host copy of counters and log, oldest first within each lane."""
        counters = values[: self._state.counter_words].view(-1, layout.COUNTER_WORDS).tolist()
        log = self._state.log_of(values)
        found: list[Violation] = []
        now = time.time_ns()
        for index, group in enumerate(self._groups):
            for number in range(layout.NUM_LANES):
                count, done = counters[index][number], self._read[index][number]
                if count <= done:
                    continue
                self._read[index][number] = count
                self._events_read += count - done
                rows = [row for row in log[index, number].tolist() if done < row[layout.ROW_EVENT] <= count]
                rows.sort(key=lambda row: row[layout.ROW_EVENT])
                self.dropped += count - done - len(rows)
                found += [self._violation(row, group.name, number, step, now) for row in rows]
        return found

    def _violation(self, row: list[int], group: str, number: int, step: int, now: int) -> Violation:
        phase = Phase.from_code(number // layout.NUM_REASONS)
        reason = Reason.from_code(number % layout.NUM_REASONS)
        hidden = reason in _PRIVATE and not self._reveal
        row_step = row[layout.ROW_STEP] >> layout.TICK_BITS
        requests = self.requests_at(row_step)
        ordinal, part = row[layout.ROW_REQUEST], row[layout.ROW_PART]
        return Violation(
            phase=phase,
            reason=reason,
            group=group,
            part=None if part == layout.Part.IDENTITY else Part.from_code(part),
            step=row_step,
            event=row[layout.ROW_EVENT],
            slot=row[layout.ROW_SLOT],
            position=row[layout.ROW_POSITION] if row[layout.ROW_POSITION] >= 0 else None,
            request=requests[ordinal % len(requests)] if ordinal >= 0 and requests else None,
            expected=None if hidden else f"{layout.unsigned(row[layout.ROW_EXPECTED]):#x}",
            actual=None if hidden else f"{layout.unsigned(row[layout.ROW_ACTUAL]):#x}",
            lag_steps=step - row_step,
            time_ns=now,
            sweep_id=self._sweep_id() if phase is Phase.SWEEP else None,
        )
