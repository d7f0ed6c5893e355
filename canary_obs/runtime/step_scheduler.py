"""What is done between forwards. On a GPU each part has the host make calls, and a step has time for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from canary_obs.runtime.commands import execute_commands
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.report.snapshot_builder import SnapshotBuilder
from canary_obs.vocabulary import Mode, Trigger

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime

# A step this long has time for one part more; a pause of the engine is no step.
_SECONDS_PER_PART = 0.025
_MOST_PARTS = 12
_IDLE_BUDGETS = 10  # of a step's time for sweeps, while the engine has nothing to do

HERE: AbstractContextManager[None] = nullcontext()


class _Task(NamedTuple):
    """One part of the work."""

    name: str
    part: str  # of the observer, as its faults are counted
    take: Callable[[], object]


class StepScheduler:
    """Counters on their way to the host, sweep, patrol, snapshots, evidence, the service's commands.

    On a GPU a copy of the counters is started behind every sixth forward, where launches cost least, and two
    turns of six fetch one and look at it. In mode `raise` every step does all three besides, so that the
    next one can raise.
    """

    def __init__(self, canary: CanaryRuntime, faults: Faults) -> None:
        self._canary, self._faults = canary, faults
        self._snapshots = SnapshotBuilder(canary)
        self._rotating = canary.state.clock.is_cuda
        self._raising = canary.config.mode is Mode.RAISE
        self._sweep_seconds = canary.config.sweep_budget_ms / 1e3
        self._interval = canary.config.sweep_interval
        self._sweep_at = self._interval or float("inf")  # forward step of the next interval sweep
        self._copy_wanted = False  # behind the next forward
        self._attending = False  # to a sweep, a drill or evidence; asked in every twelfth step while False
        self._beside = HERE
        self._hook = "pump"  # whose time the turn under way takes
        self.taken = "none"  # the name of the last turn
        fetch, look = _Task("fetch", "pump", canary.counter_reader.fetch), _Task("look", "pump", self._look)
        tell = _Task("tell", "snapshot", self._tell_or_patrol)
        patrol, want = (_Task("patrol", "patrol", take) for take in (self._patrol, self._want_and_patrol))
        orders = _Task("orders", "mailbox", self._take_orders)
        self._cycle: Iterator[_Task] = cycle(
            (want, tell, patrol, fetch, look, tell, want, tell, patrol, fetch, look, orders)
            if not self._raising
            else (tell, patrol, tell, orders)
        )

    def step(self, beside: AbstractContextManager[None]) -> None:
        """After an engine step; what this launches goes where `beside` leads."""
        canary, now = self._canary, time.monotonic()
        seconds = 0.0 if canary.last_step_end is None else now - canary.last_step_end
        canary.step_seconds += seconds
        canary.last_step_end = now
        if canary.step >= self._sweep_at:
            self._begin_sweep()
        if not self._rotating:
            self._everything(self._sweep_seconds)
            return
        self._beside = beside
        # Rows of a violation, and what its slot holds, are worth more the sooner they are read.
        if self._attending or self._raising or canary.counter_reader.alarmed:
            self._faults.guard("pump", self._hurry)
            now = time.monotonic()
        if canary.step >= canary.swa.due_step:
            self._report_windows()
        parts = 1
        if seconds >= _SECONDS_PER_PART:
            parts = min(1 + int(seconds / _SECONDS_PER_PART), _MOST_PARTS)
        while parts:
            parts -= 1
            self.taken, part, take = next(self._cycle)
            self._hook = "pump"
            try:  # not by `guard`: every step pays for each call
                take()
            except Exception as error:  # noqa: BLE001 - passed on in mode `raise`
                self._faults.met(part, error)
            before, now = now, time.monotonic()
            canary.overhead[self._hook] += now - before

    def forward_done(self) -> None:
        """Behind a forward and what was launched for it."""
        if self._copy_wanted:
            started = time.monotonic()
            self._push()
            self._canary.overhead["pump"] += time.monotonic() - started

    def idle(self) -> None:
        """Every part, and at length: nobody waits."""
        self._beside = HERE
        self._everything(_IDLE_BUDGETS * self._sweep_seconds)
        self._faults.guard("snapshot", self._snapshots.finish)

    def _everything(self, sweep_seconds: float) -> None:
        canary, faults = self._canary, self._faults
        self._advance_sweep(sweep_seconds)
        started, patrolled = time.monotonic(), canary.overhead["patrol"]
        self._advance_drill()
        faults.guard("patrol", self._timed_patrol)
        faults.guard("snapshot", self._snapshots.advance)
        faults.guard("mailbox", self._execute_commands)
        self._move()
        self._report_windows()
        self._tell_evidence()
        canary.overhead["pump"] += time.monotonic() - started - (canary.overhead["patrol"] - patrolled)

    # What is rare: on a GPU asked after in every twelfth step only, as each question costs all of them.

    def _ask(self) -> None:
        canary = self._canary
        self._attending = canary.sweeper.running or canary.drill.busy or canary.evidence.busy

    def _hurry(self) -> None:
        canary = self._canary
        with self._beside:
            self._advance_sweep(self._sweep_seconds)
            started = time.monotonic()
            self._advance_drill()
            if self._raising or canary.counter_reader.alarmed:
                self._move()
            self._tell_evidence()
            self._ask()
            canary.overhead["pump"] += time.monotonic() - started

    def _begin_sweep(self) -> None:
        """One at every so many forward steps. An engine step may hold several, and pass over the number."""
        canary = self._canary
        if not canary.paused:
            self._sweep_at = canary.step // self._interval * self._interval + self._interval
            self._faults.guard("sweep", canary.sweeper.begin_automatic, Trigger.INTERVAL, canary.step)
            self._attending = True

    def _advance_sweep(self, seconds: float) -> None:
        canary = self._canary
        if canary.sweeper.running and not canary.paused:
            started = time.monotonic()
            if not self._faults.guard(
                "sweep", canary.sweeper.advance, seconds, canary.counter_reader.next_sequence
            ):
                canary.sweeper.abort("the sweep itself failed; see the engine's log")
            canary.overhead["sweep"] += time.monotonic() - started

    def _advance_drill(self) -> None:
        canary = self._canary
        if canary.drill.busy:
            self._faults.guard("drill", canary.drill.advance, canary.step)

    def _tell_evidence(self) -> None:
        if self._canary.evidence.busy:
            self._faults.guard("evidence", self._canary.tell_evidence)

    def _report_windows(self) -> None:
        canary = self._canary
        if canary.step >= canary.swa.due_step:
            self._faults.guard("swa_divergence", canary.swa.report, canary.step, canary.counter_reader.sample)

    # The turns.

    def _want_and_patrol(self) -> None:
        self._copy_wanted = True
        self._patrol()

    def _look(self) -> None:
        canary = self._canary
        canary.counter_reader.look(canary.step)
        if canary.counter_reader.alarmed:
            with self._beside:
                canary.deliver(canary.counter_reader.rows(canary.step))
                self._ask()
        elif canary.expects_word:
            with self._beside:  # an injector heals what it planted
                canary.deliver([])

    def _tell_or_patrol(self) -> None:
        if not self._snapshots.advance():
            self._patrol()

    def _patrol(self) -> None:
        canary = self._canary
        if canary.paused or not canary.patrol.enabled:
            return
        self._hook = "patrol"
        suspected = canary.patrol.advance(idle=canary.last_step_end is None)
        if suspected:
            with self._beside:
                canary.patrol.confirm(suspected)

    def _take_orders(self) -> None:
        self._execute_commands()
        if self._copy_wanted:  # for six steps: there were no forwards, or none was shown
            with self._beside:
                self._push()
        self._ask()

    # What turns and all at once have in common.

    def _execute_commands(self) -> None:
        if commands := self._canary.reporter.receive():
            with self._beside:
                execute_commands(self._canary, commands)

    def _timed_patrol(self) -> None:
        started = time.monotonic()
        self._patrol()
        self._canary.overhead["patrol"] += time.monotonic() - started

    def _push(self) -> bool:
        self._copy_wanted = False
        return self._faults.guard("pump", self._canary.counter_reader.push, self._canary.step)

    def _move(self) -> None:
        if self._push() and self._faults.guard("pump", self._canary.counter_reader.fetch):
            self._faults.guard("pump", self._look)
