"""Injects deliberate corruption into the engine's tensors, and restores it once detected."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from canary_kernels import layout
from canary_obs.config import CanaryConfig
from canary_obs.config_values import parse_perturb
from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import StepView
from canary_obs.errors import ConfigurationError
from canary_obs.records import Violation
from canary_obs.runtime.device.byte_address import ByteAddress, locate_byte
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.perturb.injection_log import Injection, InjectionLog, Outcome
from canary_obs.vocabulary import PerturbMode

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    """A flipped bit, and how to recognise that the slot was not rewritten since."""

    address: ByteAddress
    mask: int
    corrupted: int  # value of the byte
    record: tuple[int, ...]  # of the slot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Redirect:
    """A slot-table entry that points elsewhere for one forward."""

    table: Tensor
    row: int
    column: int
    entry: int  # the right one
    right: int  # the slot that the entry refers to
    injection: Injection


class Injector:
    """The four perturbation modes on one group. Waits for the device: not for production."""

    def __init__(self, state: DeviceState, prefix_cache: PrefixCache, config: CanaryConfig) -> None:
        self._probabilities = parse_perturb(config.perturb)
        self._random = random.Random(config.perturb_seed)
        self._cache, self._warmup = prefix_cache, config.perturb_warmup
        self._limit = config.perturb_limit
        if config.perturb_group not in state.by_name:
            raise ConfigurationError(
                "perturb_group", config.perturb_group, "the engine has no such group",
                f"Groups are: {', '.join(state.by_name)}.",
            )  # fmt: skip
        self._group: Group = state.by_name[config.perturb_group]
        self._flips: dict[int, _Flip] = {}
        self._redirects: list[_Redirect] = []  # in the table now
        # Restored ones; whether both slots held the same token and prefix.
        self._ended_redirects: list[tuple[_Redirect, bool]] = []
        self.injections = InjectionLog(tuple(self._probabilities))

    def before_forward(self, view: StepView, step: int) -> None:
        """Inject into what the forward is about to use, if it uses the group."""
        if self._group.name not in view.groups:
            return
        self._try(PerturbMode.REQ_TO_TOKEN, step, lambda: self._redirect(view, step))
        self._try(PerturbMode.REAL_KV_USED, step, lambda: self._flip_used(view, step))

    def after_forward(self, view: StepView, step: int) -> None:
        """Restore the slot table; inject what follows a forward."""
        for redirect in self._redirects:
            redirect.table[redirect.row, redirect.column] = redirect.entry
            wrong, right = self._record(redirect.injection.slot), self._record(redirect.right)
            same = wrong[: layout.FINGERPRINT_K] == right[: layout.FINGERPRINT_K]
            self._ended_redirects.append((redirect, same))
        self._redirects.clear()
        if self._group.name not in view.groups:
            return
        self._try(PerturbMode.REAL_KV_POST_FORWARD, step, lambda: self._flip_written(view, step))
        self._try(PerturbMode.REAL_KV_UNUSED_CACHE, step, lambda: self._flip_unused(step))

    def match(self, violations: list[Violation], *, settled: bool) -> None:
        """Match violations with open injections; restore detected flips.

        `settled` = every violation up to the current step is known: injections without one can be closed.
        """
        for injection in self.injections.match(violations):
            self._restore(injection)
        if not settled:
            return
        for redirect, same in self._ended_redirects:
            if redirect.injection.outcome is Outcome.OPEN:
                outcome = Outcome.MASKED if same else Outcome.MISSED
                self.injections.close(
                    redirect.injection, outcome, "the other slot holds the same token and prefix"
                )
        self._ended_redirects.clear()
        for injection in self.injections.open:
            self._expire(injection)

    def finish(self) -> None:
        """Close open injections as missed. Call after a last check of every record."""
        for injection in self.injections.open:
            self.injections.close(injection, Outcome.MISSED)

    def _try(self, mode: PerturbMode, step: int, inject: Callable[[], None]) -> None:
        probability = self._probabilities.get(mode, 0.0)
        if self._limit and self.injections.injected >= self._limit:
            return
        if probability and step > self._warmup and self._random.random() < probability:
            inject()

    def _record(self, slot: int) -> tuple[int, ...]:
        return tuple(self._group.buffers.records[slot].tolist())

    def _complete(self, slot: int) -> bool:
        state = (self._record(slot)[layout.IDENTITY] >> 32) & layout.STATE_MASK
        return state == layout.RecordState.COMPLETE

    def _prefixes(self, view: StepView) -> list[tuple[int, int, int]]:
        batch = self._group.batch(view)
        rows, lengths = batch.rows.tolist(), batch.prefix_lens.tolist()
        window = self._group.view.window or layout.MAX_POSITION
        return [
            (row, max(0, length - window + 1), length)
            for row, length in zip(rows, lengths, strict=True)
            if row >= 0 and length > 0
        ]

    def _slot_at(self, table: Tensor, row: int, position: int) -> int:
        page = self._group.view.page_size
        return int(table[row, position // page]) * page + position % page

    def _redirect(self, view: StepView, step: int) -> None:
        prefixes = self._prefixes(view)
        if not prefixes:
            return
        row, first, length = self._random.choice(prefixes)
        position = self._random.randrange(first, length)
        table, page = view.groups[self._group.name].slot_table, self._group.view.page_size
        column, right = position // page, self._slot_at(table, row, position)
        entry = int(table[row, column])
        wrong_entry = self._random.randrange(self._group.view.num_slots // page)
        wrong = wrong_entry * page + position % page
        if wrong == right or self.injections.holds(self._group.name, wrong):
            return
        table[row, column] = wrong_entry
        # The wrong page may hold the same positions of another request: its links break at either end.
        also = set(range(wrong_entry * page, (wrong_entry + 1) * page))
        if (following := (column + 1) * page) < length:
            also.add(self._slot_at(table, row, following))
        injection = self._injection(PerturbMode.REQ_TO_TOKEN, wrong, step, frozenset(also))
        self.injections.add(injection)
        self._redirects.append(
            _Redirect(table=table, row=row, column=column, entry=entry, right=right, injection=injection)
        )

    def _flip_used(self, view: StepView, step: int) -> None:
        prefixes = self._prefixes(view)
        if not prefixes:
            return
        row, first, length = self._random.choice(prefixes)
        table = view.groups[self._group.name].slot_table

        def choose() -> int:
            return self._slot_at(table, row, self._random.randrange(first, length))

        self._flip(PerturbMode.REAL_KV_USED, step, choose)

    def _flip_written(self, view: StepView, step: int) -> None:
        written = [slot for slot in view.groups[self._group.name].out_slots.tolist() if slot >= 0]
        if written:
            self._flip(PerturbMode.REAL_KV_POST_FORWARD, step, lambda: self._random.choice(written))

    def _flip_unused(self, step: int) -> None:
        slots = self._cache.cached(self._group.name, unlocked_only=True).slots
        if slots.numel():
            pick = self._random.randrange
            self._flip(PerturbMode.REAL_KV_UNUSED_CACHE, step, lambda: int(slots[pick(slots.numel())]))

    def _flip(self, mode: PerturbMode, step: int, choose: Callable[[], int]) -> None:
        for _ in range(_ATTEMPTS):
            slot = choose()
            if self._complete(slot) and not self.injections.holds(self._group.name, slot):
                break
        else:
            return
        source = self._random.choice(list(self._group.view.sources))
        address = locate_byte(source, slot, self._random.randrange(source.slot_bytes))
        mask = 1 << self._random.randrange(8)
        address.flip(mask)
        injection = self._injection(mode, slot, step)
        self._flips[id(injection)] = _Flip(
            address=address, mask=mask, corrupted=address.read(), record=self._record(slot)
        )
        self.injections.add(injection)

    def _injection(
        self, mode: PerturbMode, slot: int, step: int, also: frozenset[int] = frozenset()
    ) -> Injection:
        return Injection(
            mode=mode,
            group=self._group.name,
            slot=slot,
            also=also,
            step=step,
            time_ns=time.time_ns(),
        )

    def _restore(self, injection: Injection) -> None:
        flip = self._flips.pop(id(injection), None)
        # A slot rewritten since then holds good bytes; flipping again would corrupt them.
        if flip and self._record(injection.slot) == flip.record and flip.address.read() == flip.corrupted:
            flip.address.flip(flip.mask)

    def _expire(self, injection: Injection) -> None:
        flip = self._flips.get(id(injection))
        if flip is None or self._record(injection.slot) == flip.record:
            return
        del self._flips[id(injection)]
        if injection.mode is PerturbMode.REAL_KV_USED:
            self.injections.close(
                injection, Outcome.MISSED, "read by a forward, then rewritten before any check"
            )
        else:
            self.injections.close(injection, Outcome.MASKED, "the slot was freed and rewritten unread")
