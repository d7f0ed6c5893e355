"""Schedules the work between forwards. On a GPU a step has time for one task, as each costs host time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import NamedTuple

from canary_obs.config import CanaryConfig
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.run_state import LONG_STEP_SECONDS, RunState
from canary_obs.runtime.step_workers import Workers
from canary_obs.vocabulary import HealPolicy, Mode, ObserverPart, Trigger

# A step runs one more task for each of these seconds it took, up to _MAX_TASKS: a pause is no long step.
_SECONDS_PER_TASK = 0.025
_MAX_TASKS = 12
_SECONDS_BETWEEN_TASKS = 0.004  # short steps leave tasks out: what tasks promise is promised in seconds
_SECONDS_PER_SNAPSHOT = 0.3  # so long a step makes a whole one: with a part per step it would be stale
_IDLE_BUDGETS = 10  # an idle engine sweeps for this many steps' budgets at a time

CURRENT_STREAM: AbstractContextManager[None] = nullcontext()


class _Task(NamedTuple):
    """One unit of work."""

    name: str
    part: ObserverPart  # counts its exceptions
    run: Callable[[], object]


class StepScheduler:
    """Runs copies of the counters, sweep, patrol, snapshots, evidence and commands between forwards.

    On a GPU tasks rotate in a cycle of twelve, one in each step that is not short. Twice in a cycle a copy of
    the counters is started right after a forward, where launches cost least, and later tasks fetch and
    process it. In mode `raise` every step does all three in addition, so that the next step can raise.
    """

    def __init__(
        self, workers: Workers, run: RunState, faults: Faults, config: CanaryConfig, *, on_gpu: bool
    ):
        self._workers, self._run, self._faults = workers, run, faults
        self._rotating = on_gpu  # one task per step; False = every step runs all of them
        self._raising = config.mode is Mode.RAISE
        self._healing = workers.healing  # while active, every step copies the counters, as in mode `raise`
        self._sweep_seconds = config.sweep_budget_ms / 1e3
        self._interval = config.sweep_interval
        self._sweep_at = self._interval or float("inf")  # forward step of the next interval sweep
        self._copy_wanted = False  # after the next forward
        self._urgent = False  # a sweep, a drill or evidence is under way; updated every twelfth step
        self._stream = CURRENT_STREAM  # of the launches of this step
        self._untasked = 0.0  # seconds of steps since a task ran
        self._hook = "pump"  # overhead label of the running task
        fetch = _Task("fetch", ObserverPart.COUNTERS, workers.counter_reader.fetch)
        process = _Task("process", ObserverPart.COUNTERS, self._process_copy)
        snapshot = _Task("snapshot", ObserverPart.SNAPSHOT, self._snapshot_or_patrol)
        patrol = _Task("patrol", ObserverPart.PATROL, self._patrol)
        request = _Task("request_copy", ObserverPart.PATROL, self._request_copy_and_patrol)
        commands = _Task("commands", ObserverPart.COMMANDS, self._commands_and_upkeep)
        shared = (request, snapshot, patrol, fetch, process)
        tasks: tuple[_Task, ...] = (*shared, snapshot, *shared, commands)
        if self._raising:
            tasks = (snapshot, patrol, snapshot, commands)
        self._cycle: Iterator[_Task] = cycle(tasks)

    def step(self, stream: AbstractContextManager[None]) -> None:
        """Run what this engine step has time for; `stream` is entered around launches."""
        run, now = self._run, time.monotonic()
        last, run.last_step_end = run.last_step_end, now
        seconds = 0.0 if last is None else now - last
        run.step_seconds += seconds
        self._untasked += _SECONDS_BETWEEN_TASKS if last is None else seconds
        if seconds > LONG_STEP_SECONDS:
            run.long_step_seconds, run.long_step_end = seconds, now
        if run.step >= self._sweep_at:
            self._begin_interval_sweep()
        if not self._rotating:
            self.settle()
            self._run_all(self._sweep_seconds)
            self._finish_snapshot(seconds)
            return
        self._stream = stream
        # Rows of a violation, and its slot's bytes, are worth more the sooner they are read.
        urgent = self._urgent or self._raising or self._healing.policy is not HealPolicy.OFF
        urgent = urgent or self._workers.counter_reader.alarmed
        if urgent or self._untasked >= _SECONDS_BETWEEN_TASKS:
            self.settle()
        if urgent:
            self._faults.guard(ObserverPart.COUNTERS, self._run_urgent)
            now = time.monotonic()
        if run.step >= self._workers.swa.due_step:
            self._report_swa()
        if self._untasked < _SECONDS_BETWEEN_TASKS:
            return
        self._untasked = 0.0
        for _ in range(min(1 + int(seconds / _SECONDS_PER_TASK), _MAX_TASKS)):
            run.last_task, part, run_task = next(self._cycle)
            self._hook = "pump"
            try:  # not by `guard`: every step pays for each call
                run_task()
            except Exception as error:  # noqa: BLE001 - raised again in mode `raise`
                self._faults.caught(part, error)
            before, now = now, time.monotonic()
            run.overhead[self._hook] += now - before
        self._finish_snapshot(seconds)

    def settle(self) -> None:
        """Was every forward, and every hit, shown? Before anything between forwards compares bytes.

        A step without tasks compares nothing: what it has not shown is noticed by the next that has some.
        """
        self._faults.or_disarm(self._run, self._workers.forwards.settle)
        if self._workers.hits is not None:
            self._workers.hits.settle()

    def settle_at_rest(self) -> None:
        """The same, of an engine that should have nothing under way."""
        workers = self._workers
        if not self._run.armed:
            return
        self._faults.or_disarm(self._run, workers.forwards.settle_at_rest)
        if workers.hits is not None and not workers.forwards.in_step():
            workers.hits.settle()

    def after_forward(self) -> None:
        """Start the copy of the counters that a task has requested. Call after each forward's launches."""
        if self._copy_wanted:
            started = time.monotonic()
            self._push_counters()
            self._run.overhead["pump"] += time.monotonic() - started

    def idle(self) -> None:
        """Run every task, with more time for sweeps: no forward is waiting."""
        self._stream = CURRENT_STREAM
        if self._workers.sweeper.schedule.idle_due(self._run.ready_at):
            self._begin_sweep(Trigger.IDLE)
        self._run_all(_IDLE_BUDGETS * self._sweep_seconds)
        self._faults.guard(ObserverPart.SNAPSHOT, self._workers.snapshots.finish)

    def _run_all(self, sweep_seconds: float) -> None:
        run, faults, workers = self._run, self._faults, self._workers
        self._begin_overdue_sweep()
        self._advance_sweep(sweep_seconds)
        started, patrolled = time.monotonic(), run.overhead["patrol"]
        self._advance_baselines(sweep_seconds)
        self._advance_drill()
        faults.guard(ObserverPart.PATROL, self._timed_patrol)
        faults.guard(ObserverPart.SNAPSHOT, workers.snapshots.advance)
        faults.guard(ObserverPart.COMMANDS, self._execute_commands)
        self._move_counters()
        self._report_swa()
        self._send_evidence()
        run.overhead["pump"] += time.monotonic() - started - (run.overhead["patrol"] - patrolled)

    # Urgent work is rare, and asking for it costs every step: on a GPU it is asked for in every twelfth.

    def _update_urgent(self) -> None:
        workers = self._workers
        self._urgent = self._sweep_advances or workers.drill.busy or workers.evidence.busy
        self._urgent = self._urgent or workers.baselines.due

    def _run_urgent(self) -> None:
        with self._stream:
            self._advance_sweep(self._sweep_seconds)
            started = time.monotonic()
            self._advance_baselines(self._sweep_seconds)
            self._advance_drill()
            if self._raising or self._healing.active or self._workers.counter_reader.alarmed:
                self._move_counters()
            self._send_evidence()
            self._update_urgent()
            self._run.overhead["pump"] += time.monotonic() - started

    def _begin_interval_sweep(self) -> None:
        # At multiples of the interval; an engine step with several forwards may pass over one.
        run = self._run
        if not run.paused:
            self._sweep_at = run.step // self._interval * self._interval + self._interval
            self._begin_sweep(Trigger.INTERVAL)

    def _begin_overdue_sweep(self) -> None:
        # An engine that is never idle would never sweep.
        if self._workers.sweeper.schedule.age_due(self._run.ready_at):
            self._begin_sweep(Trigger.INTERVAL)

    def _begin_sweep(self, trigger: Trigger) -> None:
        run, sweeper = self._run, self._workers.sweeper
        if not run.paused and not sweeper.running:
            self._faults.guard(ObserverPart.SWEEP, sweeper.begin_automatic, trigger, run.step)
            self._urgent = True

    @property
    def _sweep_advances(self) -> bool:
        # One that was cancelled while paused has to end.
        sweeper = self._workers.sweeper
        return sweeper.running and (sweeper.ending or not (self._run.paused or sweeper.held))

    def _advance_sweep(self, seconds: float) -> None:
        run, sweeper = self._run, self._workers.sweeper
        if self._sweep_advances:
            started = time.monotonic()
            if not self._faults.guard(
                ObserverPart.SWEEP, sweeper.advance, seconds, self._workers.counter_reader.next_sequence
            ):
                sweeper.abort("the sweep itself failed; see the engine's log")
            run.overhead["sweep"] += time.monotonic() - started

    def _advance_baselines(self, seconds: float) -> None:
        baselines = self._workers.baselines
        if baselines.due:
            sequence = self._workers.counter_reader.next_sequence
            self._faults.guard(ObserverPart.ADOPT, baselines.advance, seconds, sequence)

    def _advance_drill(self) -> None:
        if self._workers.drill.busy:
            self._faults.guard(ObserverPart.DRILL, self._workers.drill.advance, self._run.step)

    def _send_evidence(self) -> None:
        if self._workers.evidence.busy:
            self._faults.guard(ObserverPart.EVIDENCE, self._workers.delivery.send_evidence)

    def _report_swa(self) -> None:
        run, swa = self._run, self._workers.swa
        if run.step >= swa.due_step:
            sample = self._workers.counter_reader.sample
            self._faults.guard(ObserverPart.SWA_DIVERGENCE, swa.report, run.step, sample)

    def _request_copy_and_patrol(self) -> None:
        self._copy_wanted = True
        self._patrol()

    def _process_copy(self) -> None:
        counter_reader, delivery, step = self._workers.counter_reader, self._workers.delivery, self._run.step
        counter_reader.process(step)
        if counter_reader.alarmed:
            with self._stream:
                delivery.deliver(counter_reader.read_rows(step))
                self._update_urgent()
        elif delivery.wants_clean_copies:
            with self._stream:  # an injector restores the bytes that it flipped
                delivery.deliver([])

    def _snapshot_or_patrol(self) -> None:
        if not self._workers.snapshots.advance():
            self._patrol()

    def _patrol(self) -> None:
        run, patrol = self._run, self._workers.patrol
        if run.paused or not patrol.enabled:
            return
        self._hook = "patrol"
        suspicious = patrol.advance(idle=run.last_step_end is None)
        if suspicious:
            with self._stream:
                patrol.confirm(suspicious)

    def _commands_and_upkeep(self) -> None:
        self._execute_commands()
        self._begin_overdue_sweep()
        if self._copy_wanted:  # requested six steps ago: there was no forward, or none was shown
            with self._stream:
                self._push_counters()
        self._update_urgent()

    def _finish_snapshot(self, step_seconds: float) -> None:
        if step_seconds >= _SECONDS_PER_SNAPSHOT:
            self._faults.guard(ObserverPart.SNAPSHOT, self._workers.snapshots.finish)

    def _execute_commands(self) -> None:
        if commands := self._workers.reporter.receive():
            with self._stream:
                self._workers.commands.execute(commands)

    def _timed_patrol(self) -> None:
        started = time.monotonic()
        self._patrol()
        self._run.overhead["patrol"] += time.monotonic() - started

    def _push_counters(self) -> bool:
        self._copy_wanted = False
        return self._faults.guard(ObserverPart.COUNTERS, self._workers.counter_reader.push, self._run.step)

    def _move_counters(self) -> None:
        fetch = self._workers.counter_reader.fetch
        if self._push_counters() and self._faults.guard(ObserverPart.COUNTERS, fetch):
            self._faults.guard(ObserverPart.COUNTERS, self._process_copy)
