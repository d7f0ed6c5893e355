"""Re-hashes the bytes of every complete record, slot by slot, within a bandwidth budget."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from canary_kernels import layout
from canary_kernels.fingerprint import compare_range
from canary_obs.config import PatrolBudget
from canary_obs.records import PatrolProgress
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.health import Health
from canary_obs.runtime.patrol.async_checker import AsyncChecker, Return, ScanJob

_CPU_CHUNK = 128  # slots
_DEVICE_CHUNK_BYTES = 1 << 24
_MAX_CREDIT_SECONDS = 1.0  # an engine that was busy elsewhere is not charged the whole absence at once
# On a GPU errands are few and long: each takes five turns of the engine's thread, and beside real forwards a
# burst over the whole GPU disturbs less than a few programs that hold on to their multiprocessors (H200, 8B
# shape, 64 x 4096, separate runs: 9 % slower steps at 20 GB/s from 8 programs, 0.9 % at 43 GB/s from bursts).
_JOB_SECONDS, _LONGEST_JOB_SECONDS = 0.05, 0.25
_BUSY_SHARE = 0.1  # of a budget given as a fraction, while the engine is stepping


class Patrol:
    """Walks all groups' slots in order, some chunks whenever the budget has paid for one."""

    def __init__(
        self,
        state: DeviceState,
        health: Health,
        budget: PatrolBudget,
        bandwidth: float,
        counter_reader: CounterReader,
    ) -> None:
        self._state, self._health = state, health
        self._on_cpu = state.clock.device.type == "cpu"
        self._chunks = [
            (group, start, min(start + size, group.view.num_slots))
            for group in state.groups
            if group.plan.bytes_per_slot
            for size in [self._chunk_size(group)]
            for start in range(0, group.view.num_slots, size)
        ]
        # By group number: the index behind its last chunk.
        self._group_ends = {group.index: number + 1 for number, (group, _, _) in enumerate(self._chunks)}
        self._checker = AsyncChecker(state, counter_reader)
        now = time.monotonic()
        self._checked_at = [now] * len(self._chunks)
        self._cursor = 0  # the next chunk to choose
        self._chosen: ScanJob | None = None  # to be sent
        self._resting = False  # at the last refill, and so when that was chosen
        self._back: list[Return] = []  # not entered into the books yet
        self._arrived = 0  # chunks of this cycle that were checked: in order, so the next is the oldest
        self._bandwidth = bandwidth
        self.set_budget(budget)
        self._refilled = self._cycle_started = now
        self.cycles = 0
        self.cycle_seconds: float | None = None

    def set_budget(self, budget: PatrolBudget) -> None:
        """Spend this much from now on."""
        self.enabled = budget.enabled and bool(self._chunks)
        self.bytes_per_second = (
            budget.fraction * self._bandwidth if budget.fraction else budget.bytes_per_second
        )
        # On the CPU a check takes the engine's own time: a share of the bandwidth is a share of seconds then,
        # so that a slow or busy machine is not asked for more.
        self._timed = budget.fraction > 0 and self._on_cpu
        self._rate = budget.fraction if self._timed else self.bytes_per_second
        self._busy_share = _BUSY_SHARE if budget.fraction and not self._on_cpu else 1.0
        self._credit = 0.0  # seconds when timed, else bytes; below 0 = spent ahead

    def advance(self, *, idle: bool = False) -> Sequence[ScanJob]:
        """Take what came back, or check what the budget has paid for; never waits for the device.

        Returns errands with a suspicion, for `confirm`.
        """
        # On a GPU each of these is a turn: send, enter in the books, take back, see that it is done, choose.
        scout = self._checker
        if self._chosen is not None:
            job, self._chosen = self._chosen, None
            if idle or not self._resting:
                scout.send(job)
                return ()
            # Chosen for an engine at rest, it would be too long beside a forward.
            self._cursor = job.first_chunk
            self._credit += self._bytes_of(job)
        if self._back:
            back, self._back = self._back, []
            return self._enter(back)
        self._back = scout.returned()
        if self._back:
            return ()
        now = time.monotonic()
        busy_rate = self._rate * self._busy_share
        rate = self._rate if idle else busy_rate
        # What passed before a rest began was no rest.
        earned = (now - self._refilled) * (self._rate if self._resting else busy_rate)
        self._credit = min(self._credit + earned, _MAX_CREDIT_SECONDS * rate)
        self._refilled, self._resting = now, idle
        if self._on_cpu:
            return self._spend()
        # A GPU too busy to bring the last errands back is not given more.
        if not scout.look() and self._credit >= _JOB_SECONDS * rate and not scout.full:
            self._chosen = self._next(self._affordable(_LONGEST_JOB_SECONDS * rate))
            self._credit -= self._bytes_of(self._chosen)
        return ()

    @staticmethod
    def _bytes_of(job: ScanJob) -> int:
        return len(job.slots) * job.group.plan.bytes_per_slot

    def confirm(self, jobs: Iterable[ScanJob]) -> None:
        """Compare on the engine's stream, in order with every writer: what differs here is corrupt."""
        for job in jobs:
            group = job.group
            self._state.tick()
            compare_range(self._state.backend, group.buffers, group.plan, job.slots, layout.Phase.PATROL)
            self._health.count_launch(group.index, layout.Phase.PATROL)

    def _spend(self) -> list[ScanJob]:
        """On the CPU: chunks while there is credit, at most one cycle."""
        suspected: list[ScanJob] = []
        started = time.perf_counter()
        for _ in self._chunks:
            if self._credit <= (time.perf_counter() - started if self._timed else 0.0):
                break
            job = self._next(1)
            self._checker.send(job)
            suspected += self._enter(self._checker.finish())
            if not self._timed:
                self._credit -= self._bytes_of(job)
        if self._timed:
            self._credit -= time.perf_counter() - started
        return suspected

    def rest(self) -> None:
        """Time until now earns nothing: the engine was not running."""
        self._refilled = time.monotonic()

    def whole_cycle(self) -> None:
        """At rest: take what is under way, then check every chunk once, whatever the budget."""
        self.confirm(self._enter((*self._back, *self._checker.finish())))
        self._chosen, self._back = None, []
        self._cursor = self._arrived = 0
        for _ in self._chunks:
            job = self._next(1)
            self.confirm([job])
            self._checked(job)

    def _next(self, most: int) -> ScanJob:
        """The next chunks of one group, at most `most`; moves the cursor behind them."""
        first = self._cursor
        group, start, _ = self._chunks[first]
        last = min(first + most, self._group_ends[group.index]) - 1
        stop = self._chunks[last][2]
        self._cursor = (last + 1) % len(self._chunks)
        return ScanJob(group=group, slots=range(start, stop), first_chunk=first, last_chunk=last)

    def _affordable(self, most: float) -> int:
        group, start, stop = self._chunks[self._cursor]
        return max(1, int(min(self._credit, most) / ((stop - start) * group.plan.bytes_per_slot)))

    def _enter(self, returns: Iterable[Return]) -> list[ScanJob]:
        suspected = []
        for back in returns:
            if not back.ran:
                self._health.stalled.add((back.job.group.index, layout.Phase.PATROL))
            if back.suspicious:
                suspected.append(back.job)
            self._checked(back.job)
        return suspected

    def _checked(self, job: ScanJob) -> None:
        now = time.monotonic()
        first, self._arrived = job.first_chunk, job.last_chunk + 1
        self._checked_at[first : self._arrived] = [now] * (self._arrived - first)
        if self._arrived == len(self._chunks):
            self._arrived = 0
            self.cycles += 1
            self.cycle_seconds, self._cycle_started = now - self._cycle_started, now

    def _chunk_size(self, group: Group) -> int:
        if self._on_cpu:
            return _CPU_CHUNK
        size = _DEVICE_CHUNK_BYTES // group.plan.bytes_per_slot
        return max(1, min(size, -(-group.view.num_slots // 16)))

    @property
    def oldest_check_seconds(self) -> float:
        """Time since the slot checked longest ago was checked, or since attach."""
        return time.monotonic() - self._checked_at[self._arrived] if self._chunks else 0.0

    @property
    def progress(self) -> PatrolProgress | None:
        """None when the patrol is off."""
        if not self.enabled:
            return None
        return PatrolProgress(
            progress=self._arrived / len(self._chunks),
            cycles=self.cycles,
            cycle_seconds=self.cycle_seconds,
            oldest_check_seconds=self.oldest_check_seconds,
            budget_bytes_per_second=self.bytes_per_second,
        )
