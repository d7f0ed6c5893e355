"""The canary of one rank: builds the parts of the runtime, connects them, and implements the hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.views import StepView
from canary_obs.errors import EngineContractError
from canary_obs.records import Snapshot
from canary_obs.runtime.announcements import Announcements
from canary_obs.runtime.baselines import Baselines
from canary_obs.runtime.check_coverage import CheckCoverage
from canary_obs.runtime.commands import CommandExecutor
from canary_obs.runtime.delivery import ViolationDelivery
from canary_obs.runtime.device.bandwidth import measure_bandwidth
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.device.delayed_device_host import Sample
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import ViolationLog
from canary_obs.runtime.device.warm_up import warm_up
from canary_obs.runtime.evidence.collector import EvidenceCollector
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.first_reads import FirstReads
from canary_obs.runtime.forward import ForwardChecks
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.healing import Healing
from canary_obs.runtime.health import Health
from canary_obs.runtime.hit_account import HitAccount
from canary_obs.runtime.patrol.patrol import Patrol
from canary_obs.runtime.perturb.drill import Drill
from canary_obs.runtime.perturb.injector import injector_of
from canary_obs.runtime.report.counter_age import CounterAge
from canary_obs.runtime.report.reporter import Reporter
from canary_obs.runtime.report.snapshot import SnapshotSources, current_health_inputs, whole_snapshot
from canary_obs.runtime.report.snapshot_builder import SnapshotBuilder
from canary_obs.runtime.report.swa_divergence import SwaReporter
from canary_obs.runtime.run_state import RunState
from canary_obs.runtime.slot_hooks import SlotHooks
from canary_obs.runtime.step_scheduler import CURRENT_STREAM, StepScheduler
from canary_obs.runtime.step_workers import Workers
from canary_obs.runtime.sweep.sweeper import Sweeper
from canary_obs.runtime.table_account import TableAccount
from canary_obs.runtime.taint.report import TaintReporter
from canary_obs.transport.links import EngineLink
from canary_obs.vocabulary import ObserverPart, State

_UNCLOSED = "a forward was not closed; call after_forward or forward_failed after each before_write"


class CanaryRuntime(SlotHooks):
    """Observes one engine; an Observer. In mode `log` no hook raises; in mode `raise` a violation does."""

    def __init__(
        self, adapter: EngineAdapter, config: CanaryConfig, device: torch.device, link: EngineLink | None
    ) -> None:
        self.config, self._adapter, self.run = config, adapter, RunState()
        self.overhead = self.run.overhead
        self.state = DeviceState(adapter.groups, device, config, adapter.allocation(), adapter.foreign_slots)
        self.health = Health(len(self.state.groups), config)
        self._faults = Faults(self.health, config.mode)
        self.health.add_source(self.state.kv_coverage)
        self.forwards = ForwardAccount(self.state, self.health, adapter.forwards, self._in_step)
        first_reads = FirstReads(self.state, self.health, self.forwards, config)
        self.tables = TableAccount(self.health, self.forwards, adapter.compared_tables)
        self.checks = ForwardChecks(self.state, self.health, self.forwards, first_reads, config, adapter)
        self.reporter = Reporter(self.state, config, (adapter.name, adapter.version, adapter.model()), link)
        bandwidth = measure_bandwidth(self.state)
        self.sweeper = Sweeper(self.state, adapter, self.health, config, bandwidth, self.reporter.send_sweep)
        self.baselines = Baselines(self.state, bandwidth)
        self.check_coverage = CheckCoverage(self.state, self.baselines, config)
        self.health.add_source(self.check_coverage, self.check_coverage.acknowledge)
        log = ViolationLog(
            self.state, reveal_tokens=config.reveal_tokens, sweep_id=lambda: self.sweeper.latest_id,
            forget_seconds=config.longest_between_checks_seconds,
        )  # fmt: skip
        copies = config.pipeline_rows, self._counters_arrived
        self.counter_reader = CounterReader(self.state, self.health, log, *copies)
        self.health.add_source(CounterAge(self.counter_reader, self.run))
        budget = config.parsed_patrol_budget
        self.patrol = Patrol(self.state, self.health, budget, bandwidth, self.counter_reader)
        follow = device.type == "cpu" if config.write_history is None else config.write_history
        self.history = SlotHistory(self.state, follow, log.requests_at)
        announcements = Announcements(self.state, self.history, first_reads, self.checks)
        sources = self.state, self.history, adapter.holders, adapter.traceparent
        self.evidence = EvidenceCollector(*sources, reveal_tokens=config.reveal_tokens)
        self.injector = injector_of(self.state, adapter, config, self.reporter.identity)
        self.injects = self.injector is not None
        self.drill = Drill(adapter, config, device, self.reporter.send_drill)
        self.swa = SwaReporter(self.state, adapter, config.swa_divergence_interval)
        checks = self.history.written_step, self.patrol.intact_at, log, self.forwards
        sends, compared = (self.reporter.identity, self.reporter.send), config.verify_on_hit
        taint = TaintReporter(adapter, sends, checks, hits_compared=compared)
        self.healing = Healing(adapter, config, self.reporter.send_heals, self.health, self.state.by_name)
        self._sources = SnapshotSources(
            config=config, run=self.run, state=self.state, health=self.health,
            counter_reader=self.counter_reader, sweeper=self.sweeper, patrol=self.patrol, taint=taint,
            reporter=self.reporter, swa=self.swa, forwards=self.forwards, checks=self.checks,
            healing=self.healing, injections=self.injector.injections if self.injector else None,
        )  # fmt: skip
        self.delivery = ViolationDelivery(
            self.run, self._faults, self.counter_reader, self.evidence, self.reporter, self.injector, taint,
        )  # fmt: skip
        self.delivery.healing, names = self.healing, tuple(self.state.by_name)
        hits = HitAccount(names, self.health, adapter.prefix_hits) if compared else None
        SlotHooks.__init__(self, self.run, self._faults, announcements, self.delivery, hits, taint, config)
        commands = CommandExecutor(self._sources, self.evidence, self.drill, self.healing)
        workers = Workers(
            forwards=self.forwards, hits=hits, counter_reader=self.counter_reader, baselines=self.baselines,
            delivery=self.delivery, sweeper=self.sweeper, patrol=self.patrol, drill=self.drill, swa=self.swa,
            snapshots=SnapshotBuilder(self._sources), reporter=self.reporter, healing=self.healing,
            evidence=self.evidence, commands=commands,
        )  # fmt: skip
        self._scheduler = StepScheduler(workers, self.run, self._faults, config, on_gpu=device.type == "cuda")
        self.reporter.watch(self.run, self._in_step)
        self._head_done, self._depth = False, 0  # depth: of forwards within forwards

    @property
    def step(self) -> int:
        """Forwards since mark_ready."""
        return self.run.step

    def verdict(self) -> tuple[State, tuple[str, ...]]:
        """This rank's state, and every reason that keeps it from OK."""
        return self.health.verdict(current_health_inputs(self._sources))

    # Life cycle.

    def mark_ready(self) -> None:
        """Start protecting, after the engine's warm-up and graph capture; live slots count as unverified."""
        if (types := self._adapter.step_types) is not None:
            warm_up(self.state, types)
        for group in self.state.groups:
            group.buffers.records.zero_()
            group.adopt(self._adapter.slots_in_use(group.name).to(group.buffers.records.device))
        self.forwards.start()
        self.tables.start()
        self.checks.start()
        if self.hits is not None:
            self.hits.start()
        self.taint.start(self.run.step)
        self.run.ready_at, self.run.armed = time.monotonic(), True
        self.reporter.send_hello(self._adapter.record_bytes)
        self.healing.start()

    def detach(self) -> Snapshot:
        """Restore the engine, read all counters and close the link; returns the final snapshot."""
        self._faults.guard(ObserverPart.DRILL, self.drill.close)
        self._scheduler.settle_at_rest()
        self._adapter.detach()
        self._faults.guard(ObserverPart.ANNOUNCE, self._announcements.loads.close, 5.0)
        self.delivery.drain(5.0)
        report = self.swa.report, self.step, self.counter_reader.sample
        self._faults.guard(ObserverPart.SWA_DIVERGENCE, *report)
        self.reporter.send(final := whole_snapshot(self._sources))
        self.run.armed = False
        self.reporter.close(final)
        return final

    def check_everything(self, timeout: float = 60.0) -> None:
        """Complete baselines, a patrol cycle and a sweep, and deliver results; the engine must be at rest."""
        self._scheduler.settle_at_rest()
        self.baselines.advance(timeout, self.counter_reader.next_sequence)
        self.delivery.check_everything(self.patrol, self.sweeper, timeout)

    # Hooks around a forward. `guard` is spelled out: every forward pays for each call.

    def may_compare_early(self, view: StepView) -> bool:
        """Whether `before_write` may be given `early`: the last forward showed this view."""
        return not (self._depth or self.injects) and self.checks.may_compare_early(view)

    def before_write(self, view: StepView, early: Tensor | None = None) -> None:
        """Compare the bytes of the slots that the forward is about to overwrite: `early`, or the view's."""
        run = self.run
        if not run.armed:
            return
        self._depth += 1
        if self._depth > 1:  # a forward within a forward
            return
        run.step += 1
        started = time.perf_counter()
        try:
            if early is not None:
                self.checks.compare_early(view, early, run.step)
            else:
                inject = None if self.injector is None else self.injector.before_forward
                self.checks.before_write(view, run.step, inject)
            self._head_done = True
        except Exception as error:  # noqa: BLE001 - raised again in mode `raise`
            self._head_failed(view, error)
        run.overhead["head"] += time.perf_counter() - started

    def forward_launched(self, view: StepView) -> None:
        """Write the identities of the new tokens; verify every link of every request's prefix."""
        if self._depth != 1 or not self._head_done:
            return
        started = time.perf_counter()
        try:
            self.counter_reader.log.remember_requests(self.run.step, view.request_ids)
            self.checks.head(view)
            self.history.record_writes(view)
        except Exception as error:  # noqa: BLE001 - raised again in mode `raise`
            self._head_failed(view, error)
        self.run.overhead["head"] += time.perf_counter() - started

    def before_forward(self, view: StepView) -> None:
        """Do both, for an adapter whose view is complete before the forward."""
        self.checks.replays = None  # in a replay the head waits for the tail
        self.before_write(view)
        self.forward_launched(view)

    def after_forward(self, view: StepView) -> None:
        """Fingerprint the new slots; verify every link again, including those of the new tokens."""
        if not self._leave_forward():
            return
        if self._head_done:
            started = time.perf_counter()
            try:
                self.checks.tail()
                if self.injector is not None:
                    self.injector.after_forward(view, self.run.step)
            except Exception as error:  # noqa: BLE001 - raised again in mode `raise`
                self._faults.caught(ObserverPart.TAIL, error)
                self._abandon(view)
            self.run.overhead["tail"] += time.perf_counter() - started
        self._scheduler.after_forward()

    def forward_failed(self, view: StepView) -> None:
        """Count the slots that the forward should have written as unverified."""
        if self._leave_forward():
            self._abandon(view)
            self._scheduler.after_forward()
        elif self.run.armed and self._depth == 0:
            self._or_disarm(lambda: self.checks.never_began(view))

    # Hooks between forwards.

    def after_step(self, stream: AbstractContextManager[None] = CURRENT_STREAM) -> None:
        """Run the scheduled tasks: counters, sweep, patrol, commands, reports."""
        if self.run.armed:
            if self._depth:
                self._close_forward()
            self._scheduler.step(stream)
            if self.delivery.pending:
                self.delivery.raise_pending()

    def idle(self) -> bool:
        """Run all tasks while the engine has no requests. True = call again soon."""
        run = self.run
        if not run.armed or not self._or_disarm(self.forwards.settle_idle):
            return run.armed
        if self._depth:
            self._close_forward()
        run.last_step_end = None
        self._scheduler.idle()
        self.delivery.raise_pending()
        return (self.sweeper.running and not run.paused) or self.counter_reader.alarmed

    def fault(self, part: str, error: Exception) -> None:
        """The adapter failed to show a forward, which may have written any slot: all count as unverified."""
        self._faults.count_fault(part, error)
        self.taint.tracker.lost(None if part == ObserverPart.ANNOUNCE else self.run.step + 1)
        if self.run.armed:
            self._or_disarm(self.state.adopt_all)

    def _counters_arrived(self, copy: Sample, step: int) -> None:
        self.sweeper.update(copy, step)
        # Before the baselines: it asks whether the copy was made with some on their way.
        self.check_coverage.update(copy)
        self.baselines.update(copy)

    def _head_failed(self, view: StepView, error: Exception) -> None:
        self._head_done = False
        self._faults.caught(ObserverPart.HEAD, error)
        self._abandon(view)

    def _close_forward(self) -> None:
        # Forwards that began after it were taken for its own, and may have written any slot.
        self._depth, self._head_done = 0, False
        self.fault(ObserverPart.UNCLOSED_FORWARD, EngineContractError(_UNCLOSED))

    def _in_step(self) -> bool:
        return self._depth > 0 or self._adapter.in_step()

    def _leave_forward(self) -> bool:
        depth, self._depth = self._depth, self._depth - (self._depth > 0)
        return depth == 1

    def _abandon(self, view: StepView) -> None:
        self._or_disarm(lambda: self.checks.abandon(view))

    def _or_disarm(self, recover: Callable[[], object]) -> bool:
        return self._faults.or_disarm(self.run, recover)
