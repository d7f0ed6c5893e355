"""The group that faults are injected into, read from the device. Waits for it: not for production."""

from __future__ import annotations

import random
import time

from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.views import StepView
from canary_obs.runtime.device.state import Group
from canary_obs.runtime.perturb.injection import Injection
from canary_obs.runtime.perturb.injection_log import InjectionLog
from canary_obs.vocabulary import PerturbMode

NO_PREFIX = "no request of the forward has a prefix in the group"


class Target:
    """The group, the log of injections and the random numbers that all modes share."""

    def __init__(self, group: Group, seed: int, injections: InjectionLog) -> None:
        self.group, self.injections = group, injections
        self.random = random.Random(seed)
        self.name, self.page_size = group.name, group.view.page_size

    def record(self, slot: int) -> tuple[int, ...]:
        """The words of the slot's record."""
        return tuple(self.group.buffers.records[slot].tolist())

    def is_complete(self, slot: int) -> bool:
        """Whether the slot's bytes have a fingerprint."""
        state = (self.record(slot)[layout.IDENTITY] >> 32) & layout.STATE_MASK
        return state == layout.RecordState.COMPLETE

    def has_bytes(self, slot: int) -> bool:
        """Whether they lie on this rank."""
        return self.group.plan.sharding.holds(slot)

    def position(self, slot: int) -> int:
        """What the slot's record says."""
        meta = (self.record(slot)[layout.IDENTITY] >> 32) >> layout.STATE_BITS
        return meta & layout.MAX_POSITION

    def prefixes(self, view: StepView) -> list[tuple[int, int, int]]:
        """Row, first and last position (exclusive) that the forward reads, of each request with a prefix."""
        batch = self.group.batch(view)
        rows, lengths = batch.rows.tolist(), batch.prefix_lens.tolist()
        window = self.group.view.window or layout.MAX_POSITION
        return [
            (row, max(0, length - window + 1), length)
            for row, length in zip(rows, lengths, strict=True)
            if row >= 0 and length > 0
        ]

    def table(self, view: StepView) -> Tensor:
        """The forward's slot table."""
        return view.groups[self.name].slot_table

    def sharing(self, view: StepView) -> list[str]:
        """The groups of the forward that read the same table: a wrong entry misleads all of them."""
        own = self.table(view)
        return [name for name, shown in view.groups.items() if shown.slot_table.data_ptr() == own.data_ptr()]

    def slot_at(self, table: Tensor, row: int, position: int) -> int:
        """The slot of a position, by the table."""
        page = self.page_size
        return int(table[row, position // page]) * page + position % page

    def holds(self, slot: int) -> bool:
        """Whether an open injection is in this slot."""
        return self.injections.holds(self.name, slot)

    def injection(
        self,
        mode: PerturbMode,
        slot: int,
        step: int,
        *,
        position: int,
        detail: str,
        also: frozenset[tuple[str, int]] = frozenset(),
        following: frozenset[int] = frozenset(),
    ) -> Injection:
        """A new injection, added to the log."""
        made = Injection(
            mode=mode, group=self.name, slot=slot, also=also, position=position, following=following,
            detail=detail, step=step, time_ns=time.time_ns(),
        )  # fmt: skip
        self.injections.add(made)
        return made
