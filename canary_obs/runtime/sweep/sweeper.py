"""Sweeps: full passes over the prefix cache, a slice per engine step."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots
from canary_kernels.verify import verify_list
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.records import StartSweep, SweepProgress
from canary_obs.runtime.device.delayed_device_host import Sample
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.device.upload_ring import UploadRing
from canary_obs.runtime.health import Health
from canary_obs.runtime.sweep.schedule import SweepSchedule
from canary_obs.runtime.sweep.shares import SweepShares
from canary_obs.runtime.sweep.sweep_pass import SweepPass
from canary_obs.runtime.sweep.totals import COUNTED_CAUSES, sweep_totals
from canary_obs.runtime.sweep.walk import SweepWalk
from canary_obs.vocabulary import Cause, SweepStatus, Trigger

_CPU_CHUNK = 256  # slots
_DEVICE_CHUNK, _DEVICE_CHUNK_BYTES = 4096, 1 << 30  # some 0.2 ms of host time
_UPLOADS = 32


class Sweeper:
    """Runs at most one sweep at a time; a commanded sweep replaces an automatic one."""

    def __init__(
        self,
        state: DeviceState,
        adapter: EngineAdapter,
        health: Health,
        config: CanaryConfig,
        bandwidth: float,
        report: Callable[[SweepProgress], None],
    ) -> None:
        self._state, self._health, self._config = state, health, config
        self._report = report
        self._bandwidth = bandwidth
        self._walk = SweepWalk(state, adapter, config)
        device = state.clock.device
        self._on_cpu = device.type == "cpu"
        self._uploads = UploadRing(3 * _DEVICE_CHUNK, _UPLOADS, device)
        self._pass: SweepPass | None = None
        self._queued: StartSweep | None = None
        self._held: str | None = None  # id of the sweep that an operator paused
        self._baseline = sweep_totals(None)
        self._shares = SweepShares(state, adapter.prefix_cache)
        health.add_source(self._walk)
        self._automatic = 0
        self.passes = dict.fromkeys(Trigger, 0)
        self.last: SweepProgress | None = None
        self.last_completed_ns: int | None = None
        self.schedule = SweepSchedule(config)

    @property
    def running(self) -> bool:
        """Whether a sweep is under way or waiting for its counters."""
        return self._pass is not None

    @property
    def ending(self) -> bool:
        """Whether the sweep under way only waits for its counters."""
        return self._pass is not None and self._pass.ending is not None

    @property
    def held(self) -> bool:
        """Whether an operator paused the sweep under way, which has more to check."""
        current = self._pass
        return current is not None and current.ending is None and current.command.id == self._held

    @property
    def latest_id(self) -> str | None:
        """The id of the running sweep, else of the last: rows may arrive with the copy that ends it."""
        return self.progress.id if self.progress else None

    @property
    def progress(self) -> SweepProgress | None:
        """The running sweep, else the last."""
        return self._describe(self._pass, SweepStatus.RUNNING) if self._pass else self.last

    def request(self, command: StartSweep, step: int) -> None:
        """Start a commanded sweep now, or when the sweep under way has ended."""
        if self._pass is None:
            self._start(command, Trigger.DEMAND, step)
            return
        self._queued = command
        if self._pass.trigger is not Trigger.DEMAND:
            self.cancel(self._pass.command.id)

    def cancel(self, sweep_id: str) -> None:
        """Stop a sweep; an unknown id is ignored, as the sweep may just have ended."""
        if self._queued is not None and self._queued.id == sweep_id:
            self._queued = None
        if self._pass is not None and self._pass.command.id == sweep_id:
            self._pass.ending = SweepStatus.CANCELLED

    def hold(self, sweep_id: str, *, paused: bool) -> None:
        """Pause or resume a sweep that is under way or queued; an unknown id is ignored."""
        known = [self._queued, self._pass.command if self._pass else None]
        if not any(command is not None and command.id == sweep_id for command in known):
            return
        self._held = sweep_id if paused else None
        if self._pass is not None and self._pass.command.id == sweep_id and (progress := self.progress):
            self._report(progress)

    def begin_automatic(self, trigger: Trigger, step: int) -> None:
        """Start an interval or idle sweep unless one is under way."""
        if self._pass is None:
            self._automatic += 1
            name = f"{trigger.value}-{time.time_ns():x}-{self._automatic}"
            command = StartSweep(
                id=name,
                unlocked_only=self._config.unlocked_only,
                swa_resident_only=self._config.swa_resident_only,
            )
            try:
                self._start(command, trigger, step)
            except Exception as error:
                self.schedule.ended(SweepStatus.FAILED, f"{type(error).__name__}: {error}")
                raise

    def advance(self, budget_seconds: float, next_sequence: int) -> None:
        """Launch checks for `budget_seconds`, of host time or of estimated device time.

        `next_sequence` is that of the next counter copy. A chunk is not begun when, by what the last one
        took, it would end later; each call launches one.
        """
        current = self._pass
        if current is None or current.settles_at >= 0 or self.held:
            return
        if current.command.budget_ms is not None:  # an idle engine has more than one step's
            budget_seconds *= current.command.budget_ms / self._config.sweep_budget_ms
        now = time.perf_counter()
        deadline = now + budget_seconds - current.began_seconds
        if current.began_seconds:  # the step that began it does no more than the budget has left
            current.began_seconds = 0.0
            if now >= deadline:
                return
        while current.ending is None:
            if current.next_group == len(current.work):
                current.ending = SweepStatus.PASSED
                break
            if not (self._uploads.ready and current.work[current.next_group][1].ready):
                break  # they wait for the device, and a step does not
            device_seconds = self._timed_chunk(current)
            deadline -= device_seconds
            before, now = now, time.perf_counter()
            if now + (now - before) + device_seconds > deadline:
                break
        if current.ending is not None:
            current.settles_at = next_sequence

    def update(self, sample: Sample, step: int) -> None:
        """Count results from a host copy of the counters; end the sweep once it holds all of them."""
        current = self._pass
        if current is None:
            return
        counters = sample.values[: self._state.counter_words]
        counts = sweep_totals(counters)
        current.totals = {name: counts[name] - self._baseline[name] for name in counts}
        if current.ending is None or current.settles_at < 0 or sample.sequence < current.settles_at:
            return
        shortfall = [self._walk.mismatch(name) for name in current.groups]
        shortfall.append(self._shares.shortfall(counters))
        ended = self._ended(current, "; ".join(filter(None, shortfall)))
        ended = msgspec.structs.replace(ended, shares=self._shares.settle(counters))
        self._finish(current, ended)
        self._baseline = counts
        if self._queued is not None:
            command, self._queued = self._queued, None
            self._start(command, Trigger.DEMAND, step)

    def abort(self, error: str) -> None:
        """End the sweep as FAILED, once what it launched has been counted."""
        if self._pass is not None:
            self._pass.ending, self._pass.error = SweepStatus.FAILED, error

    def _start(self, command: StartSweep, trigger: Trigger, step: int) -> None:
        names = command.groups or tuple(self._state.by_name)
        current = SweepPass(
            command=command, trigger=trigger, work=[], total=0, started_ns=time.time_ns(),
            started=time.perf_counter(), step=step, groups=names,
        )  # fmt: skip
        refusal = self._walk.refusal(command)
        if refusal is None:
            try:
                current.work += [
                    (self._state.by_name[name], self._walk.begin(name, command)) for name in names
                ]
            except UnsupportedEngine as error:  # the engine does not show what its prefix cache holds
                refusal = str(error)
        if refusal is not None:
            if self._walk.is_whole(command):
                self.schedule.ended(SweepStatus.FAILED, refusal)
            self.last = self._describe(current, SweepStatus.FAILED, refusal)
            self._report(self.last)
            return
        current.total = sum(walk.total for _, walk in current.work)
        current.began_seconds = time.perf_counter() - current.started
        self._pass = current
        self._shares.start()
        for name in names:
            group = self._state.by_name[name]
            self._shares.owe(group, next((walk.total for g, walk in current.work if g is group), 0))
        self._report(self._describe(current, SweepStatus.RUNNING))

    def _timed_chunk(self, current: SweepPass) -> float:
        group, _ = current.work[current.next_group]
        began = time.perf_counter() - current.started
        device_seconds, evicted = self._check_chunk(current)
        ended = time.perf_counter() - current.started
        self._shares.add_chunk(group.index, evicted, began, ended)
        return device_seconds

    def _check_chunk(self, current: SweepPass) -> tuple[float, int]:
        """Launch the next chunk; returns estimated seconds of GPU time (0 on the CPU), and slots left out."""
        group, walk = current.work[current.next_group]
        cached = self._walk.take(group.name, walk, self._chunk_size(group))
        count = cached.slots.numel()
        if not count:
            current.next_group += 1
            return 0.0, 0
        slots, previous = self._walk.still_cached(group.name, cached.slots, cached.previous)
        evicted = int((slots < 0).sum())
        slots, positions, previous = self._uploads.put(slots, cached.positions, previous)
        self._state.tick()
        verify_list(self._state.backend, group.buffers, slots, positions, previous, layout.Phase.SWEEP)
        self._health.count_launch(group.index, layout.Phase.SWEEP)
        if not current.command.data:
            return 0.0, evicted
        self._state.owed.compared(group.index, layout.Phase.SWEEP, count)
        compare_slots(self._state.backend, group.buffers, group.plan, slots, layout.Phase.SWEEP)
        size = count * group.plan.bytes_per_slot
        return 0.0 if self._on_cpu or not size else size / self._bandwidth, evicted

    def _chunk_size(self, group: Group) -> int:
        if self._on_cpu:
            return _CPU_CHUNK
        return max(1, min(_DEVICE_CHUNK, _DEVICE_CHUNK_BYTES // max(1, group.plan.bytes_per_slot)))

    def _ended(self, current: SweepPass, shortfall: str) -> SweepProgress:
        assert current.ending is not None
        status, error, seen = current.ending, current.error, current.totals
        if status is SweepStatus.PASSED:
            uncompared = seen["comparable"] - seen["compared"]
            if not shortfall and current.command.data and uncompared:
                shortfall = f"bytes of {uncompared} of {seen['comparable']} slots were not compared"
            if shortfall:
                status, error = SweepStatus.FAILED, shortfall
            elif seen["violations"]:
                status = SweepStatus.VIOLATED
            elif not seen["checked"]:
                skipped = f"all {current.total} slots were skipped" if current.total else "no slot is cached"
                error = f"nothing was checked: {skipped}"
        return self._describe(current, status, error)

    def _finish(self, current: SweepPass, result: SweepProgress) -> None:
        self._pass = None
        self.last = result
        self._held = None
        complete = result.status in (SweepStatus.PASSED, SweepStatus.VIOLATED)
        self.passes[current.trigger] += complete
        # One that left something out says nothing about the age of the last look at everything.
        if self._walk.is_whole(current.command) or not complete:
            self.schedule.ended(result.status, result.error)
            if complete:
                self.last_completed_ns = time.time_ns()
        self._report(result)

    def _describe(self, current: SweepPass, status: SweepStatus, error: str | None = None) -> SweepProgress:
        seen = current.totals
        skipped = {cause: seen.get(cause.value, 0) for cause in COUNTED_CAUSES} | {
            Cause.EVICTED: self._shares.evicted if self._pass is current else 0
        }
        return SweepProgress(
            id=current.command.id, trigger=current.trigger, status=status, groups=current.groups,
            data=current.command.data, total=current.total, checked=seen.get("checked", 0), skipped=skipped,
            violations=seen.get("violations", 0), started_ns=current.started_ns,
            seconds=time.perf_counter() - current.started, step=current.step, error=error,
            paused=current.command.id == self._held and status is SweepStatus.RUNNING,
        )  # fmt: skip
