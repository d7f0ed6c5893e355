"""All device memory of one rank, allocated once at attach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers, RowBatch
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import FingerprintPlan, plan_fingerprint
from canary_obs.config import CanaryConfig
from canary_obs.errors import ConfigurationError
from canary_obs.records import GroupInfo, Part
from canary_obs.views import GroupView, StepView

_PARTS = {layout.Part.K: Part.K, layout.Part.V: Part.V}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group with its memory."""

    index: int
    view: GroupView
    buffers: GroupBuffers
    plan: FingerprintPlan
    slot_range: Tensor  # int64 [num_slots]: 0, 1, 2, ...; patrol takes slices

    @property
    def name(self) -> str:
        """The group's label."""
        return self.view.name

    def batch(self, step: StepView) -> RowBatch:
        """This group's view of a forward; shares the engine's tensors."""
        mine = step.groups[self.view.name]
        starts = torch.zeros_like(step.prefix_lens)
        if self.view.window is not None:
            starts = (step.prefix_lens - self.view.window + 1).clamp_(min=0)
        return RowBatch(
            slot_table=mine.slot_table,
            page_size=self.view.page_size,
            rows=step.rows,
            starts=starts,
            prefix_lens=step.prefix_lens,
            extend_lens=step.extend_lens,
            token_starts=step.token_starts,
            digests=step.digests,
            input_ids=step.input_ids,
            positions=step.positions,
            out_slots=mine.out_slots,
            expected_ids=step.expected_ids,
        )

    def info(self) -> GroupInfo:
        """The group as the service is told about it."""
        sources = self.view.sources
        return GroupInfo(
            name=self.name,
            layers=len({source.layer for source in sources}),
            parts=tuple(_PARTS[part] for part in sorted({source.part for source in sources})),
            slots=self.view.num_slots,
            slot_bytes=sum(source.slot_bytes for source in sources),
            protected_slot_bytes=self.plan.bytes_per_slot,
        )

    def adopt(self, slots: Tensor) -> None:
        """Forget what is known of these slots (int64 [n]; -1 = skip) but accept them as live."""
        state = int(layout.RecordState.ADOPTED) << 32
        held = slots[slots >= 0]
        self.buffers.records[held] = torch.tensor([state, 0, 0, 0], device=slots.device)

    def forget(self, slots: Tensor) -> None:
        """Empty the records of these slots (int64 [n]; -1 = skip)."""
        self.buffers.records[slots[slots >= 0]] = 0

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Records follow their bytes (int64 [n] each)."""
        self.buffers.records[destination] = self.buffers.records[source]


class DeviceState:
    """Clock, counters, violation log (one flat allocation) and records of every group."""

    def __init__(self, views: Sequence[GroupView], device: torch.device, config: CanaryConfig) -> None:
        count, rows = len(views), config.lane_rows
        log_shape = (count, layout.NUM_LANES, rows, layout.ROW_WORDS)
        counter_words = count * layout.COUNTER_WORDS
        log_words = count * layout.NUM_LANES * rows * layout.ROW_WORDS
        # Counters and log lie together so that one copy carries rows and the counts that explain them.
        self.flat = torch.zeros(counter_words + log_words, dtype=torch.int64, device=device)
        self.counters = self.flat[:counter_words]
        self.counter_words = counter_words
        self.log_shape = log_shape
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._step = self._turn = 0
        self.backend = choose_backend(config.backend, device)
        counters = self.counters.view(count, layout.COUNTER_WORDS)
        log = self.flat[counter_words:].view(log_shape)
        coverage = layout.RealData[config.real_data.upper()]
        self.groups = tuple(
            Group(
                index=index,
                view=view,
                buffers=GroupBuffers(
                    records=torch.zeros(
                        (view.num_slots, layout.RECORD_WORDS), dtype=torch.int64, device=device
                    ),
                    counters=counters[index],
                    violations=log[index],
                    clock=self.clock,
                ),
                plan=plan_fingerprint(view.sources, coverage, device),
                slot_range=torch.arange(view.num_slots, dtype=torch.int64, device=device),
            )
            for index, view in enumerate(views)
        )
        self.by_name = {group.name: group for group in self.groups}

    def tick(self, step: int | None = None) -> None:
        """Move the clock to a forward step, or by one turn within it, ahead of the launches that stamp it."""
        self._step = self._step if step is None else step
        self._turn = (self._turn + 1) % (1 << layout.TURN_BITS)
        self.clock.fill_(self._step << layout.TURN_BITS | self._turn)

    @property
    def coverage(self) -> float:
        """Share of the pools' KV bytes that fingerprints cover, 0 to 1."""
        infos = [group.info() for group in self.groups]
        pool = sum(info.slot_bytes * info.slots for info in infos)
        return sum(info.protected_slot_bytes * info.slots for info in infos) / pool if pool else 0.0

    @property
    def record_bytes(self) -> int:
        """Device bytes of the records of all groups."""
        return sum(group.view.num_slots for group in self.groups) * layout.RECORD_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Device bytes of counters, violation log, clock and slot ranges."""
        ranges = sum(group.slot_range.nbytes for group in self.groups)
        return self.flat.nbytes + self.clock.nbytes + ranges


def choose_backend(name: str, device: torch.device) -> Backend:
    """The backend for a device: Triton on GPUs, torch on CPUs; an explicit wish is obeyed or refused."""
    if name == "auto":
        return Backend.TRITON if device.type == "cuda" else Backend.TORCH
    if name == "torch" and device.type == "cuda":
        raise ConfigurationError(
            "backend", name, "the torch backend synchronises with the host on a GPU", "Use triton or auto."
        )
    return Backend(name)
