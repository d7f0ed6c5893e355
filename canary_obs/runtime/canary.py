"""The canary of one rank: one engine step, from the forward to the service."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_obs.config import CanaryConfig, parse_patrol_budget
from canary_obs.engine_api.views import StepView
from canary_obs.errors import KVCacheViolation
from canary_obs.records import Snapshot, Violation
from canary_obs.runtime.announcements import Announcements
from canary_obs.runtime.device.bandwidth import measured_bandwidth
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.warm_up import warm_up
from canary_obs.runtime.evidence.collector import EvidenceCollector
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.forward import ForwardChecks
from canary_obs.runtime.health import Health
from canary_obs.runtime.patrol.patrol import Patrol
from canary_obs.runtime.perturb.drill import Drill
from canary_obs.runtime.perturb.injector import Injector
from canary_obs.runtime.report.reporter import Reporter
from canary_obs.runtime.report.snapshot import current_health_inputs, whole_snapshot
from canary_obs.runtime.report.swa_divergence import SwaReporter
from canary_obs.runtime.step_scheduler import HERE, StepScheduler
from canary_obs.runtime.sweep.sweeper import Sweeper
from canary_obs.runtime.transfer import RecordShares
from canary_obs.transport.links import EngineLink
from canary_obs.vocabulary import Mode, State, Trigger

if TYPE_CHECKING:
    from canary_obs.engine_api.adapter import EngineAdapter

_RAISE_SECONDS = 5.0  # mode raise waits this long for what the comparison of a transfer found
HOOKS = ("head", "tail", "sweep", "patrol", "pump", "adapter")


class CanaryRuntime:
    """Observes one engine. In mode `log` no hook raises; in mode `raise` the first violation does."""

    def __init__(
        self, adapter: EngineAdapter, config: CanaryConfig, device: torch.device, link: EngineLink | None
    ) -> None:
        self.config, self._adapter = config, adapter
        self.state = DeviceState(adapter.groups, device, config)
        self.health = Health(len(self.state.groups), config)
        faults = Faults(self.health, config.mode)
        self._guard, self._count_fault = faults.guard, faults.count
        self._checks = ForwardChecks(self.state, self.health, config)
        self.reporter = Reporter(self.state, config, (adapter.name, adapter.version), link)
        bandwidth = measured_bandwidth(self.state)
        self.sweeper = Sweeper(
            self.state, adapter.prefix_cache, self.health, config, bandwidth, self.reporter.sweep
        )
        self.counter_reader = CounterReader(self.state, self.health, self.sweeper, config)
        budget = parse_patrol_budget(config.patrol_budget)
        self.patrol = Patrol(self.state, self.health, budget, bandwidth, self.counter_reader)
        follow = device.type == "cpu" if config.write_history is None else config.write_history
        self.history = SlotHistory(self.state, follow, self.counter_reader.log.requests_at)
        self._announcements = Announcements(self.state, self.history)
        self._shares = RecordShares(self.state, faults)
        self.evidence = EvidenceCollector(
            self.state, self.history, adapter.holders, reveal_tokens=config.reveal_tokens
        )
        self.injector = Injector(self.state, adapter.prefix_cache, config) if config.perturb else None
        self.drill = Drill(adapter, config, device, self.reporter)
        self._turns = StepScheduler(self, faults)
        self.swa = SwaReporter(self.state, adapter, config.swa_divergence_interval)
        self.overhead = dict.fromkeys(HOOKS, 0.0)  # seconds
        self.step, self.step_seconds = 0, 0.0
        self.armed = self._head_done = self.paused = False
        self._depth = 0  # of forwards within forwards
        self.ready_at = 0.0
        self.last_step_end: float | None = None
        self._raising: list[Violation] = []

    # Life ---------------------------------------------------------------------------------------

    def mark_ready(self) -> None:
        """Warm-up and graph capture are over: protect from here on; live slots are adopted, unverified."""
        types = self._adapter.step_types
        if types is not None:
            warm_up(self.state, types)
        for group in self.state.groups:
            group.buffers.records.zero_()
            group.adopt(self._adapter.slots_in_use(group.name).to(group.buffers.records.device))
        self.ready_at = time.monotonic()
        self.armed = True
        self.reporter.hello()

    def detach(self) -> Snapshot:
        """Restore the engine, drain the pipeline, say goodbye; returns the final snapshot."""
        self._guard("drill", self.drill.close)
        self._adapter.detach()
        self.deliver(self.counter_reader.drain(self.step, 5.0))
        self._guard("swa_divergence", self.swa.report, self.step, self.counter_reader.sample)
        final = whole_snapshot(self)
        self.reporter.tell(final)
        self.armed = False
        self.reporter.goodbye(final)
        return final

    def check_everything(self, timeout: float = 60.0) -> None:
        """With the engine at rest: one patrol cycle and one full sweep, all results in, ledger closed."""
        deadline = time.monotonic() + timeout
        self.patrol.whole_cycle()
        self.deliver(self.counter_reader.drain(self.step, timeout))
        self.sweeper.begin_automatic(Trigger.IDLE, self.step)
        while self.sweeper.running and time.monotonic() < deadline:
            self.sweeper.advance(1.0, self.counter_reader.next_sequence)
            self.deliver(self.counter_reader.drain(self.step, timeout))
        if self.injector is not None:
            self.injector.finish()

    # What adapters call -------------------------------------------------------------------------

    def before_write(self, view: StepView) -> None:
        """Compare the bytes of the slots that the forward is about to write, while they are there."""
        if self.armed:
            self._depth += 1
            if self._depth == 1:  # else a forward within a forward
                self.step += 1
                self._take_head(self._begin, view)

    def forward_launched(self, view: StepView) -> None:
        """Write the identities of the new tokens; verify every link of every request's prefix."""
        if self._depth == 1 and self._head_done:
            self._take_head(self._head, view)

    def before_forward(self, view: StepView) -> None:
        """Both, where the view is complete ahead of the forward."""
        self.before_write(view)
        self.forward_launched(view)

    def after_forward(self, view: StepView) -> None:
        """Fingerprint the new slots; verify every link again, the new tokens' included."""
        if not self._leave_forward():
            return
        if self._head_done:
            started = time.perf_counter()
            if not self._guard("tail", self._tail, view):
                self._abandon(view)
            self.overhead["tail"] += time.perf_counter() - started
        self._turns.forward_done()

    def forward_failed(self, view: StepView) -> None:
        """What this forward should have written is unknown: adopt it, unverified."""
        if self._leave_forward():
            self._abandon(view)
            self._turns.forward_done()

    def after_step(self, stream: AbstractContextManager[None] = HERE) -> None:
        """Advance sweep and patrol, move counters to the host, obey commands, report."""
        if self.armed:
            self._turns.step(stream)
            if self._raising:
                self._raise_found()

    def idle(self) -> bool:
        """The engine has nothing to do: commands, sweeps and patrol go on. True = call again soon."""
        if not self.armed:
            return False
        self.last_step_end = None
        if self.config.idle_sweep and not self.paused and self.sweeper.idle_due(self.ready_at):
            self._guard("sweep", self.sweeper.begin_automatic, Trigger.IDLE, self.step)
        self._turns.idle()
        self._raise_found()
        return self.sweeper.running or self.counter_reader.busy

    def fault(self, part: str, error: Exception) -> None:
        """The adapter failed to show a forward: it may have written any slot, so all are adopted."""
        self._count_fault(part, error)
        if self.armed:
            self._or_disarm(self.state.adopt_all)

    def copied(self, group: str, source: Tensor, destination: Tensor) -> None:
        """The engine copied slots: their records follow."""
        self._announced(self._announcements.copied, group, source, destination)

    def received(self, group: str, slots: Tensor, records: Tensor | None = None) -> None:
        """Bytes arrived: compared with their records, or adopted, unverified, when they came without."""
        self._announced(self._announcements.received, group, slots, records)
        if self.armed and records is not None and self.config.mode is Mode.RAISE:
            self.deliver(self.counter_reader.drain(self.step, _RAISE_SECONDS))
            self._raise_found()

    def records_of(self, group: str, slots: Tensor, shares: Sequence[range] = ()) -> Tensor | None:
        """What to send along with these slots, to receivers of these shares of the heads; None = nothing."""
        return self._shares.of(group, slots, shares) if self.armed else None

    def record_format(self, group: str) -> int | None:
        """What a sender's number must be for its records to be compared here."""
        return self._shares.format_of(group) if self.armed else None

    def invalidated(self, group: str, slots: Tensor) -> None:
        """The engine no longer vouches for these slots."""
        self._announced(self._announcements.invalidated, group, slots)

    def _announced(self, take: Callable[..., None], *what: object) -> None:
        if self.armed and not self._guard("announce", take, *what, self.step):
            self._or_disarm(self.state.adopt_all)

    # One forward --------------------------------------------------------------------------------

    def _take_head(self, part: Callable[[StepView], None], view: StepView) -> None:
        started = time.perf_counter()
        self._head_done = self._guard("head", part, view)
        if not self._head_done:
            self._abandon(view)
        self.overhead["head"] += time.perf_counter() - started

    def _begin(self, view: StepView) -> None:
        if self.injector is not None:
            self.injector.before_forward(view, self.step)
        self._checks.before_write(view, self.step)

    def _head(self, view: StepView) -> None:
        self.counter_reader.log.remember(self.step, view.request_ids)
        self._checks.head(view)
        self.history.wrote(view)

    def _tail(self, view: StepView) -> None:
        self._checks.tail()
        if self.injector is not None:
            self.injector.after_forward(view, self.step)

    def _leave_forward(self) -> bool:
        depth, self._depth = self._depth, max(self._depth - 1, 0)
        return depth == 1

    def _abandon(self, view: StepView) -> None:
        self._or_disarm(lambda: self._checks.abandon(view))

    def _or_disarm(self, recover: Callable[[], None]) -> None:
        try:
            recover()
        except Exception as error:  # noqa: BLE001 - records can't be trusted any more: better blind than wrong
            self.armed = False
            self.health.disarmed = f"records could not be adopted after a fault ({type(error).__name__})"
            self._count_fault("adopt", error)

    # What was found -----------------------------------------------------------------------------

    def _raise_found(self) -> None:
        if self._raising:
            found, self._raising = tuple(self._raising), []
            self.reporter.flush()  # the process may end of it
            raise KVCacheViolation(found)

    def tell_evidence(self) -> None:
        """Send what was read of violated slots."""
        for evidence in self.evidence.advance(self.reporter.identity, self.step):
            self.reporter.tell(evidence)

    @property
    def last_turn(self) -> str:
        """On a GPU: what the last step had time for."""
        return self._turns.taken

    @property
    def expects_word(self) -> bool:
        """Whether `deliver` has something to do with a copy of the counters in which nothing was found."""
        return self.injector is not None or bool(self.reporter.backlog)

    def deliver(self, found: list[Violation]) -> None:
        """Act on violations (none: on a copy of the counters that shows none)."""
        if found:  # before the injector heals what it planted
            self._guard("evidence", self.evidence.observe, found, self.step)
        if self.injector is not None:
            self.injector.observe(found, settled=self.counter_reader.settled(self.step))
        if self.config.mode is Mode.RAISE:
            self._raising += [self.evidence.with_holders(violation) for violation in found]
        self.reporter.violations(found)

    # What is known ------------------------------------------------------------------------------

    def verdict(self) -> tuple[State, tuple[str, ...]]:
        """This rank's state and every reason against OK."""
        return self.health.verdict(current_health_inputs(self))
