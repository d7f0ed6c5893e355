"""Coverage of checks: of the slots that came up for a check lately, the share that could be checked.

Coverage of bytes says what fingerprints could see; this says what was seen. Counted by head, tail and sweep:

- verified, and `baseline`: checked, or checked as far as a slot without history can be;
- `adopted`: a debt, below the target a reason;
- tokens of scheduled requests are compared with what the scheduler knows of them, or left out: a debt, too;
- `pending` at the head is checked by the tail, where it counts again; `no_fingerprint` is coverage of bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from canary_kernels import layout
from canary_obs.config import CanaryConfig
from canary_obs.runtime.baselines import Baselines
from canary_obs.runtime.device.delayed_device_host import Sample
from canary_obs.runtime.device.state import DeviceState
from canary_obs.vocabulary import SlotState, State

WINDOW_SECONDS = 10.0
_SAMPLE_SECONDS = 0.5
_PHASES = layout.Phase.HEAD, layout.Phase.TAIL, layout.Phase.SWEEP
_VERIFIED = [layout.COUNT_VERIFIED + phase for phase in _PHASES]


def _unverified(cause: layout.Unverified) -> list[int]:
    return [layout.COUNT_UNVERIFIED + phase * layout.NUM_UNVERIFIED + cause for phase in _PHASES]


_COMPARED, _LEFT_OUT = [layout.COUNT_TOKENS_COMPARED], [layout.COUNT_TOKENS_LEFT_OUT]
_ADOPTED, _BASELINE = _unverified(layout.Unverified.ADOPTED), _unverified(layout.Unverified.BASELINE)

_WORDS = _VERIFIED, _BASELINE, _ADOPTED, _COMPARED, _LEFT_OUT


class _Totals(NamedTuple):
    """Slot checks since attach."""

    seconds: float
    verified: int
    baseline: int
    adopted: int
    compared: int  # requests whose tokens were compared with the scheduler's
    left_out: int  # and those of which it said nothing that could be compared


class CheckCoverage:
    """A source of reasons (see Health.add_source)."""

    def __init__(
        self,
        state: DeviceState,
        baselines: Baselines,
        config: CanaryConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        target = config.check_coverage_target
        self._target = config.coverage_target if target is None else target
        self._state, self._baselines, self._clock = state, baselines, clock
        self._window = deque([_Totals(clock(), 0, 0, 0, 0, 0)])
        self._accepted = 0  # adopted slots without a baseline when an operator acknowledged them
        self._accepted_adoptions = 0  # made by then

    def update(self, sample: Sample) -> None:
        """Take up a host copy of the counters."""
        if self._expected_wait:
            self._window.clear()  # until then, what is met was acknowledged, too
        now, window = self._clock(), self._window
        if len(window) > 1 and now - window[-2].seconds < _SAMPLE_SECONDS:
            window.pop()
        counts = sample.values[: self._state.counter_words].view(-1, layout.COUNTER_WORDS).sum(0).tolist()
        totals = (sum(counts[word] for word in words) for words in _WORDS)
        window.append(_Totals(now, *totals))
        while len(window) > 2 and window[1].seconds < now - WINDOW_SECONDS:
            window.popleft()

    def acknowledge(self) -> None:
        """Leave the debt there is now out of later verdicts."""
        self._accepted, self._accepted_adoptions = self._debt(), self._state.adoptions.count
        while len(self._window) > 1:
            self._window.popleft()

    def reasons(self) -> list[tuple[State, str]]:
        """What keeps this rank from OK."""
        found, baselines = [], self._baselines
        if baselines.missing_runs:
            found.append((State.BLIND, f"runs of the baseline kernel are missing: {baselines.missing_runs}"))
        debt = self._debt()
        self._accepted = min(self._accepted, debt)
        if baselines.waiting and not self._expected_wait:
            total = sum(group.view.num_slots for group in self._state.groups)
            visited = f"{baselines.visited} of {total} slots visited"
            found.append((State.DEGRADED, f"adopted slots wait for a baseline: {visited}"))
        elif not baselines.waiting and debt > self._accepted and self._target > 0:
            found.append((State.DEGRADED, f"{debt} adopted slots have no baseline: none covers their bytes"))
        if not self._window:
            return found
        first, last = self._window[0], self._window[-1]
        adopted = last.adopted - first.adopted
        due = last.verified - first.verified + last.baseline - first.baseline + adopted
        excused = self._accepted > 0 and debt <= self._accepted
        if adopted > (1 - self._target) * due and not excused:
            share = f"{1 - adopted / due:.1%} checked, target {self._target:.1%}"
            seconds = last.seconds - first.seconds
            counts = f"{adopted} of {due} slot checks of the last {seconds:.0f} s were unverified (adopted)"
            found.append((State.DEGRADED, f"{counts}: {share}"))
        left_out, requests = last.left_out - first.left_out, last.compared - first.compared
        requests += left_out
        if left_out > (1 - self._target) * requests:
            share = f"{1 - left_out / requests:.1%} compared, target {self._target:.1%}"
            text = f"tokens of {left_out} of {requests} requests were not compared with the scheduler's"
            found.append((State.DEGRADED, f"{text}: {share}"))
        return found

    @property
    def _expected_wait(self) -> bool:
        """Whether baselines are on their way, of slots whose adoption was acknowledged."""
        return self._baselines.waiting and self._state.adoptions.count <= self._accepted_adoptions

    def _debt(self) -> int:
        return sum(found[SlotState.ADOPTED] for found in self._baselines.found.values())
