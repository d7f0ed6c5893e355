"""The device memory of one rank, allocated once at attach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers, RowBatch, allocate_shares, allocate_sums
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan, baseline_slots, layer_plans, plan_fingerprint
from canary_kernels.write import reset_slots
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.views import GroupView, KVAllocation, StepView
from canary_obs.errors import EngineContractError
from canary_obs.records import GroupInfo
from canary_obs.runtime.device.adoptions import Adoptions
from canary_obs.runtime.device.arrivals import Arrivals
from canary_obs.runtime.device.backend import choose_backend
from canary_obs.runtime.device.batches import BatchCache, FirstPositions
from canary_obs.runtime.device.coverage import KVCoverage
from canary_obs.runtime.device.layer_rotation import LayerRotation
from canary_obs.runtime.device.owed_slots import OwedSlots
from canary_obs.runtime.device.uploads import prepare_uploads, uploaded
from canary_obs.vocabulary import Part

_ADOPTED = layout.identity_of(0, 0, layout.RecordState.ADOPTED)
FORWARD_TICKS = (1 << layout.TICK_BITS) + 1  # from one forward to the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group with its memory."""

    index: int
    backend: Backend
    view: GroupView
    memory: Tensor  # int64 [num_slots + 1, RECORD_WORDS]; skipped slots write to the last row
    buffers: GroupBuffers  # its records are `memory` without the last row
    plan: FingerprintPlan
    first_positions: FirstPositions
    batches: BatchCache
    adoptions: Adoptions
    layers: LayerRotation
    foreign_slots: Callable[[str], Tensor | None]  # by group name: slots whose bytes another group has

    @property
    def name(self) -> str:
        """The group's label."""
        return self.view.name

    def batch(self, step: StepView) -> RowBatch:
        """This group's part of a forward, on the engine's own tensors; its `starts` are to be computed."""
        shown = step.groups[self.view.name]
        tokens = shown.tokens or step
        own_rows = shown.tokens.rows if shown.tokens else None
        rows = step.rows if own_rows is None else own_rows
        starts = self.first_positions.of(tokens.prefix_lens)
        columns = (
            shown.slot_table, rows, starts, tokens.prefix_lens, tokens.extend_lens, tokens.token_starts,
            tokens.digests, tokens.input_ids, tokens.positions, shown.out_slots, tokens.expected_ids,
            tokens.known_lens, tokens.known_digests,
        )  # fmt: skip
        if (cached := self.batches.get(columns)) is not None:
            return cached
        batch = RowBatch(
            slot_table=shown.slot_table, page_size=self.view.page_size, rows=rows, starts=starts,
            prefix_lens=tokens.prefix_lens, extend_lens=tokens.extend_lens, token_starts=tokens.token_starts,
            digests=tokens.digests, input_ids=tokens.input_ids, positions=tokens.positions,
            out_slots=shown.out_slots, expected_ids=tokens.expected_ids,
            known_lens=tokens.known_lens, known_digests=tokens.known_digests,
        )  # fmt: skip
        return self.batches.put(columns, batch)

    def info(self) -> GroupInfo:
        """The group's description for the service."""
        sources = self.view.sources
        return GroupInfo(
            name=self.name,
            layers=len({source.layer for source in sources}),
            parts=tuple(Part.from_code(part) for part in sorted({source.part for source in sources})),
            slots=self.view.num_slots,
            slot_bytes=self.view.slot_bytes,
            protected_slot_bytes=self.plan.bytes_per_slot,
        )

    def adopt(self, slots: Tensor) -> None:
        """Mark slots (int64 [n]; -1 = skip) as ADOPTED: live, with unknown history."""
        self._reset(slots, layout.RecordState.ADOPTED)
        self.adoptions.count += slots.numel() > 0

    def adopt_all(self) -> None:
        """Mark every slot as ADOPTED, and empty those whose bytes another group has."""
        self.adoptions.others += 1
        self.buffers.records.zero_()
        self.buffers.records[:, layout.IDENTITY].fill_(_ADOPTED)
        self.adoptions.count += 1
        others = self.foreign_slots(self.name)
        if others is not None and others.numel():
            self.forget(uploaded(others, self.memory.device))

    def await_bytes(self, slots: Tensor) -> None:
        """Mark slots (int64 [n]; -1 = skip) as AWAITED: no baseline is taken before their bytes arrived."""
        self._reset(slots, layout.RecordState.AWAITED)

    def receive(self, slots: Tensor) -> None:
        """Forget the history of slots (int64 [n], each once; -1 = skip) and take their baseline."""
        self._reset(slots, layout.RecordState.ADOPTED)
        self.take_baseline(slots)

    def take_baseline(self, slots: Tensor) -> None:
        """Fingerprint those of these slots (int64 [n], each once; -1 = skip) that are ADOPTED."""
        self.adoptions.others += 1
        slots = slots.to(self.memory.device, non_blocking=True).contiguous()
        baseline_slots(self.backend, self.buffers, self.plan, slots)
        self.adoptions.baselines[self.index] += 1

    def slots_between(self, start: int, stop: int) -> Tensor:
        """int64 [n]: slots from start up to stop, or to the end of the pool."""
        device = self.buffers.records.device
        return torch.arange(start, min(stop, self.view.num_slots), dtype=torch.int64, device=device)

    def forget(self, slots: Tensor) -> None:
        """Empty the records of these slots (int64 [n]; -1 = skip)."""
        self._reset(slots, layout.RecordState.EMPTY)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy records of slots (int64 [n] each; -1 = skip). Without a source a destination is ADOPTED."""
        self.adoptions.others += 1
        self.memory.index_copy_(0, self._rows_of(destination), self.records_of(source))

    def records_of(self, slots: Tensor) -> Tensor:
        """int64 [n, RECORD_WORDS]: a copy of the records of these slots (int64 [n]); ADOPTED for -1."""
        spare = self.memory[-1].zero_()  # skipped slots were written here
        spare[layout.IDENTITY].fill_(_ADOPTED)  # an assignment would wait for the device
        return self.memory.index_select(0, self._rows_of(slots))

    def store(self, slots: Tensor, records: Tensor) -> None:
        """Store records (int64 [n, RECORD_WORDS]) of slots (int64 [n]; -1 = skip).

        Raises EngineContractError for another shape or dtype.
        """
        if records.shape != (slots.shape[0], layout.RECORD_WORDS) or records.dtype is not torch.int64:
            raise EngineContractError(
                f"records are {records.dtype} {list(records.shape)} for {slots.shape[0]} slots; the rule is "
                f"int64 [{slots.shape[0]}, {layout.RECORD_WORDS}]; send what records_of returned"
            )
        self.adoptions.others += 1
        self.memory.index_copy_(0, self._rows_of(slots), records.to(self.memory.device, non_blocking=True))

    def _reset(self, slots: Tensor, state: layout.RecordState) -> None:
        self.adoptions.others += 1
        slots = slots.to(self.memory.device, non_blocking=True).contiguous()
        reset_slots(self.backend, self.buffers, slots, state)

    def _rows_of(self, slots: Tensor) -> Tensor:
        # Selecting with a mask would wait for the device, which knows how many are left.
        slots = slots.to(self.memory.device, torch.int64, non_blocking=True)
        count = self.view.num_slots  # the row of all that are no slots: a remainder of -1, too
        return slots.clamp(-1, count).remainder_(count + 1)


class DeviceState:
    """Clock, counters, violation log and records of every group.

    `side_counters` is laid out like `counters` and counts what runs on the patrol's own stream: its
    violations are unconfirmed.
    """

    def __init__(
        self, views: Sequence[GroupView], device: torch.device, config: CanaryConfig,
        allocation: KVAllocation | None = None,
        foreign_slots: Callable[[str], Tensor | None] = lambda _: None,
    ) -> None:  # fmt: skip
        count, rows = len(views), config.lane_rows
        self._log_shape = (count, layout.NUM_LANES, rows, layout.ROW_WORDS)
        counter_words = count * layout.COUNTER_WORDS
        log_words = count * layout.NUM_LANES * rows * layout.ROW_WORDS
        # Counters and log lie together so that one copy carries rows and the counts that explain them.
        self.flat = torch.zeros(2 * counter_words + log_words, dtype=torch.int64, device=device)
        self.all_counters = self.flat[: 2 * counter_words]
        self.counters, self.side_counters = self.all_counters.chunk(2)
        self.counter_words = counter_words
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        if self.clock.is_cuda:
            prepare_uploads(self.clock.device)  # which has a number, as later copies' devices have
        # On the CPU: the same memory, in a tenth of the time of a torch operation.
        self._host_clock = None if self.clock.is_cuda else self.clock.numpy()
        self._step = self._tick = self.now = 0  # now: value of the clock
        self._clock_set = True  # on the device, too
        self.adoptions, self.arrivals = Adoptions(), Arrivals()
        self.backend = choose_backend(config.backend, device)
        counters, log = self.counters.view(count, layout.COUNTER_WORDS), self.log_of(self.flat)
        coverage = layout.RealData[config.real_data.upper()]
        memories = [
            torch.zeros((view.num_slots + 1, layout.RECORD_WORDS), dtype=torch.int64, device=device)
            for view in views
        ]
        self.groups = tuple(
            Group(
                index=index,
                backend=self.backend,
                view=view,
                memory=memories[index],
                buffers=GroupBuffers(
                    records=memories[index][:-1],
                    counters=counters[index],
                    violations=log[index],
                    clock=self.clock,
                    sums=allocate_sums(device),
                    shares=allocate_shares(device),
                ),
                plan=plan,
                first_positions=FirstPositions(view.window, device),
                batches=BatchCache(),
                adoptions=self.adoptions,
                layers=LayerRotation(layer_plans(plan) if config.layer_data else (), device),
                foreign_slots=foreign_slots,
            )
            for index, view in enumerate(views)
            for plan in [plan_fingerprint(view.sources, coverage, device)]
        )
        self.by_name = {group.name: group for group in self.groups}
        self.owed = OwedSlots(tuple(self.by_name))
        self.kv_coverage = KVCoverage([group.info() for group in self.groups], allocation)
        self.coverage = self.kv_coverage.ratio

    def log_of(self, flat: Tensor) -> Tensor:
        """int64 [groups, NUM_LANES, lane_rows, ROW_WORDS]: the violation log in `flat` or a copy of it."""
        return flat[2 * self.counter_words :].view(self._log_shape)

    def tick(self, step: int | None = None) -> None:
        """Advance the clock by a tick, and to forward `step` if given. Call before launches that read it."""
        self.advance(self._step if step is None else step)
        self.set_clock()

    def advance(self, step: int) -> bool:
        """The same on the host alone. True = the device's clock is so far behind as `FORWARD_TICKS` says.

        What brings it up to `now` calls `clock_is_set`.
        """
        before, self._step = self.now if self._clock_set else -1, step
        self._tick = (self._tick + 1) % (1 << layout.TICK_BITS)
        self.now = self._step << layout.TICK_BITS | self._tick
        self._clock_set = False
        return self.now - before == FORWARD_TICKS and before >= 0

    def set_clock(self) -> None:
        """Set the device's clock to `now`."""
        if self._host_clock is None:
            self.clock.fill_(self.now)
        else:
            self._host_clock[0] = self.now
        self._clock_set = True

    @property
    def clock_set(self) -> bool:
        """Whether the device's clock is, or with what was launched will be, at `now`."""
        return self._clock_set

    def clock_is_set(self) -> None:
        """What was just launched brings the device's clock to `now`."""
        self._clock_set = True

    @property
    def step(self) -> int:
        """The last forward that the clock was set to."""
        return self._step

    def named(self, names: Iterable[str]) -> tuple[Group, ...]:
        """The groups with these names. Raises EngineContractError for one that was not shown at attach."""
        try:
            return tuple(self.by_name[name] for name in names)
        except KeyError as error:
            known = ", ".join(self.by_name)
            raise EngineContractError(
                f"group {error.args[0]!r} was not shown at attach; known are {known}; "
                "the adapter names every group in `groups`"
            ) from None

    def adopt_all(self) -> None:
        """Mark every slot of every group as ADOPTED."""
        for group in self.groups:
            group.adopt_all()

    @property
    def record_bytes(self) -> int:
        """Device bytes of the records of all groups."""
        return sum(group.view.num_slots for group in self.groups) * layout.RECORD_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Device bytes of counters, violation log, clock and scratch: independent of the pool's size."""
        scratch = sum(sums.nbytes for group in self.groups if (sums := group.buffers.sums) is not None)
        return self.flat.nbytes + self.clock.nbytes + scratch
