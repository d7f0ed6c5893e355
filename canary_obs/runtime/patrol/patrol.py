"""Re-hashes the bytes of every complete record, slot by slot, within a bandwidth budget."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from canary_kernels import layout
from canary_kernels.fingerprint import compare_range
from canary_obs.config_values import PatrolBudget
from canary_obs.records import PatrolProgress
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.health import Health
from canary_obs.runtime.patrol.async_checker import AsyncChecker, ScanJob, ScanResult

_CPU_CHUNK = 128  # slots
_DEVICE_CHUNK_BYTES = 1 << 24
_MAX_CREDIT_SECONDS = 1.0  # after a longer absence of the engine the patrol does not catch up
# On a GPU jobs are few and long: each takes five tasks of the engine's thread, and during real forwards a
# burst over the whole GPU disturbs less than a few programs that hold on to their multiprocessors (H200, 8B
# shape, 64 x 4096, separate runs: 9 % slower steps at 20 GB/s from 8 programs, 0.9 % at 43 GB/s from bursts).
_JOB_SECONDS, _MAX_JOB_SECONDS = 0.05, 0.25  # of the budget
_BUSY_SHARE = 0.1  # of a budget given as a fraction, while the engine is stepping


class Patrol:
    """Cycles over the slots of all groups in order, checking chunks as the budget allows."""

    def __init__(
        self,
        state: DeviceState,
        health: Health,
        budget: PatrolBudget,
        bandwidth: float,
        counter_reader: CounterReader,
    ) -> None:
        """`bandwidth` in bytes per second, for a budget given as a fraction of it."""
        self._state, self._health, self._counter_reader = state, health, counter_reader
        self._on_cpu = state.clock.device.type == "cpu"
        self._chunks = [
            (group, start, min(start + size, group.view.num_slots))
            for group in state.groups
            if group.plan.bytes_per_slot
            for size in [self._chunk_size(group)]
            for start in range(0, group.view.num_slots, size)
        ]
        # By group number: the index after its last chunk.
        self._group_ends = {group.index: number + 1 for number, (group, _, _) in enumerate(self._chunks)}
        self._checker = AsyncChecker(state, counter_reader)
        now = time.monotonic()
        self._checked_at = [now] * len(self._chunks)  # time.monotonic() by chunk
        # By chunk: the last forward before it was passed and found intact; -1 = not yet.
        self._intact = [-1] * len(self._chunks)
        self._cursor = 0  # the next chunk to choose
        self._chosen: ScanJob | None = None  # to be submitted by the next call
        self._was_idle = False  # when credit was added last, and so when `_chosen` was chosen
        self._results: list[ScanResult] = []  # to be applied by the next call
        self._checked = 0  # chunks of this cycle that were passed, in order: the next one is the oldest, but
        self._left_out: set[int] = set()  # for those whose last check did not run
        self._bandwidth = bandwidth
        self.set_budget(budget)
        self._credited_at = self._cycle_started = now
        self.cycles = 0
        self.cycle_seconds: float | None = None

    def set_budget(self, budget: PatrolBudget) -> None:
        """Use this budget from now on."""
        self.enabled = budget.enabled and bool(self._chunks)
        self.bytes_per_second = (
            budget.fraction * self._bandwidth if budget.fraction else budget.bytes_per_second
        )
        # On the CPU a check takes the engine's own time: a share of the bandwidth is a share of seconds then,
        # so that a slow or busy machine is not asked for more.
        self._timed = budget.fraction > 0 and self._on_cpu
        self._rate = budget.fraction if self._timed else self.bytes_per_second
        self._busy_share = _BUSY_SHARE if budget.fraction and not self._on_cpu else 1.0
        self._credit = 0.0  # seconds when timed, else bytes; negative = overspent

    def advance(self, *, idle: bool = False) -> Sequence[ScanJob]:
        """Do one small part of the patrol's work; never waits for the device.

        Returns suspicious jobs, for `confirm`. `idle` = no forward is running.
        """
        # On a GPU each of these is a call of its own: submit a job, apply results, fetch results, see that
        # jobs are done, choose a job.
        checker = self._checker
        if self._chosen is not None:
            job, self._chosen = self._chosen, None
            if idle or not self._was_idle:
                checker.submit(job)
                return ()
            # Chosen for an idle engine, it would take too long next to a forward.
            self._cursor = job.first_chunk
            self._credit += self._bytes_of(job)
        if self._results:
            results, self._results = self._results, []
            return self._apply(results)
        self._results = checker.results()
        if self._results:
            return ()
        now = time.monotonic()
        busy_rate = self._rate * self._busy_share
        rate = self._rate if idle else busy_rate
        # Time before the engine became idle earns the busy rate.
        earned = (now - self._credited_at) * (self._rate if self._was_idle else busy_rate)
        self._credit = min(self._credit + earned, _MAX_CREDIT_SECONDS * rate)
        self._credited_at, self._was_idle = now, idle
        if self._on_cpu:
            return self._spend()
        # A GPU too busy to complete the jobs in flight is not given more.
        if not checker.poll() and self._credit >= _JOB_SECONDS * rate and not checker.full:
            self._chosen = self._next_job(self._affordable(_MAX_JOB_SECONDS * rate))
            self._credit -= self._bytes_of(self._chosen)
        return ()

    @staticmethod
    def _bytes_of(job: ScanJob) -> int:
        return len(job.slots) * job.group.plan.bytes_per_slot

    def confirm(self, jobs: Iterable[ScanJob]) -> None:
        """Compare on the engine's stream, in order with every write: a difference here is a violation."""
        for job in jobs:
            group = job.group
            self._state.tick()
            self._state.owed.compared(group.index, layout.Phase.PATROL, len(job.slots))
            compare_range(self._state.backend, group.buffers, group.plan, job.slots, layout.Phase.PATROL)
            self._health.count_launch(group.index, layout.Phase.PATROL)

    def _spend(self) -> list[ScanJob]:
        """On the CPU: check chunks while there is credit, at most one cycle."""
        suspicious: list[ScanJob] = []
        started = time.perf_counter()
        for _ in self._chunks:
            if self._credit <= (time.perf_counter() - started if self._timed else 0.0):
                break
            job = self._next_job(1)
            self._checker.submit(job)
            suspicious += self._apply(self._checker.wait())
            if not self._timed:
                self._credit -= self._bytes_of(job)
        if self._timed:
            self._credit -= time.perf_counter() - started
        return suspicious

    def skip_time(self) -> None:
        """Earn nothing for the time since the last `advance`: the engine was not running."""
        self._credited_at = time.monotonic()

    def whole_cycle(self) -> None:
        """Wait for the jobs in flight, then check every chunk once; the engine must be at rest."""
        self.confirm(self._apply((*self._results, *self._checker.wait())))
        self._chosen, self._results = None, []
        self._cursor = self._checked = 0
        for _ in self._chunks:
            job = self._next_job(1)
            self.confirm([job])
            self._mark_passed(job, checked=True)

    def _next_job(self, max_chunks: int) -> ScanJob:
        """The next chunks of one group; moves the cursor past them."""
        first = self._cursor
        group, start, _ = self._chunks[first]
        last = min(first + max_chunks, self._group_ends[group.index]) - 1
        stop = self._chunks[last][2]
        self._cursor = (last + 1) % len(self._chunks)
        # On a GPU later forwards may still be running, and read what is compared after the comparison.
        newest = self._counter_reader.sample
        step = self._state.step if self._on_cpu else -1 if newest is None else newest.step
        return ScanJob(group=group, slots=range(start, stop), first_chunk=first, last_chunk=last, step=step)

    def _affordable(self, max_bytes: float) -> int:
        """Chunks that the credit pays for, at least one."""
        group, start, stop = self._chunks[self._cursor]
        return max(1, int(min(self._credit, max_bytes) / ((stop - start) * group.plan.bytes_per_slot)))

    def _apply(self, results: Iterable[ScanResult]) -> list[ScanJob]:
        suspicious = []
        for result in results:
            if result.missing:
                self._state.owed.lost(result.job.group.index, layout.Phase.PATROL, result.missing)
            if not result.ran:
                self._health.stalled.add((result.job.group.index, layout.Phase.PATROL))
            if result.suspicious:
                suspicious.append(result.job)
            elif result.ran:
                job = result.job
                for chunk in range(job.first_chunk, job.last_chunk + 1):
                    self._intact[chunk] = max(self._intact[chunk], job.step)
            self._mark_passed(result.job, checked=result.ran)
        return suspicious

    def _mark_passed(self, job: ScanJob, *, checked: bool) -> None:
        """The patrol is past a job's chunks; those that were not checked keep their age."""
        now = time.monotonic()
        first, self._checked = job.first_chunk, job.last_chunk + 1
        for chunk in range(first, self._checked):
            if checked:
                self._checked_at[chunk] = now
                self._left_out.discard(chunk)
            else:
                self._left_out.add(chunk)
        if self._checked == len(self._chunks):
            self._checked = 0
            self.cycles += 1
            self.cycle_seconds, self._cycle_started = now - self._cycle_started, now

    def intact_at(self, name: str, slot: int) -> int | None:
        """The last forward before a slot was passed and found intact; None = it was not passed."""
        for (group, start, stop), step in zip(self._chunks, self._intact, strict=True):
            if group.name == name and start <= slot < stop:
                return step if step >= 0 else None
        return None

    def _chunk_size(self, group: Group) -> int:
        if self._on_cpu:
            return _CPU_CHUNK
        size = _DEVICE_CHUNK_BYTES // group.plan.bytes_per_slot
        return max(1, min(size, -(-group.view.num_slots // 16)))

    @property
    def oldest_check_seconds(self) -> float:
        """Age of the oldest check of any slot, or the time since attach if that is shorter."""
        if not self._chunks:
            return 0.0
        return time.monotonic() - min(self._checked_at[chunk] for chunk in (self._checked, *self._left_out))

    @property
    def progress(self) -> PatrolProgress | None:
        """For the snapshot; None when the patrol is off."""
        if not self.enabled:
            return None
        return PatrolProgress(
            progress=self._checked / len(self._chunks),
            cycles=self.cycles,
            cycle_seconds=self.cycle_seconds,
            oldest_check_seconds=self.oldest_check_seconds,
            budget_bytes_per_second=self.bytes_per_second,
        )
