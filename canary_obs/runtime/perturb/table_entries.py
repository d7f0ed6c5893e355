"""Slot-table entries that point elsewhere for one forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.views import StepView
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.runtime.perturb.target import NO_PREFIX, Target
from canary_obs.vocabulary import PerturbMode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Redirect:
    """A slot-table entry that points elsewhere for one forward."""

    table: Tensor
    row: int
    column: int
    entry: int  # the right one
    right: int  # the slot that the entry refers to
    injection: Injection

    def undo(self) -> None:
        """Write the right entry again."""
        self.table[self.row, self.column] = self.entry


class TableEntries:
    """Mode req_to_token."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._redirects: list[_Redirect] = []  # in the table now
        # Restored ones; whether both slots held the same token and prefix.
        self._ended: list[tuple[_Redirect, bool]] = []

    def redirect(self, view: StepView, step: int) -> str | None:
        """Let an entry point to another slot; returns why not, None = it does."""
        target, prefixes = self._target, self._target.prefixes(view)
        if not prefixes:
            return NO_PREFIX
        row, first, length = target.random.choice(prefixes)
        position = target.random.randrange(first, length)
        table, page = target.table(view), target.page_size
        column, right = position // page, target.slot_at(table, row, position)
        entry = int(table[row, column])
        wrong_entry = target.random.randrange(target.group.view.num_slots // page)
        wrong = wrong_entry * page + position % page
        if wrong == right:
            return "the other entry that was drawn is the right one"
        if target.holds(wrong):
            return "the other slot holds an injection already"
        table[row, column] = wrong_entry
        # The wrong page may hold the same positions of another request: its links break at either end.
        also = set(range(wrong_entry * page, (wrong_entry + 1) * page))
        if (following := (column + 1) * page) < length:
            also.add(target.slot_at(table, row, following))
        injection = target.injection(
            PerturbMode.REQ_TO_TOKEN, wrong, step, position=position,
            also=frozenset((name, slot) for name in target.sharing(view) for slot in also),
            detail=f"row={row}, column={column}, entry={wrong_entry} instead of {entry}",
        )  # fmt: skip
        self._redirects.append(
            _Redirect(table=table, row=row, column=column, entry=entry, right=right, injection=injection)
        )
        return None

    def restore(self) -> None:
        """The forward is over."""
        for redirect in self._redirects:
            redirect.undo()
            wrong, right = self._target.record(redirect.injection.slot), self._target.record(redirect.right)
            same = wrong[: layout.FINGERPRINT_K] == right[: layout.FINGERPRINT_K]
            self._ended.append((redirect, same))
        self._redirects.clear()

    def abandon(self) -> None:
        """The forward has failed: what it read does not matter."""
        for redirect in self._redirects:
            redirect.undo()
            if redirect.injection.outcome is Outcome.OPEN:
                self._target.injections.close(redirect.injection, Outcome.MASKED, "the forward failed")
        self._redirects.clear()

    def settle(self) -> None:
        """Close what was not detected; every violation up to now is known."""
        for redirect, same in self._ended:
            if redirect.injection.outcome is Outcome.OPEN:
                outcome = Outcome.MASKED if same else Outcome.MISSED
                why = "the other slot holds the same token and prefix" if same else "no check named it"
                self._target.injections.close(redirect.injection, outcome, why)
        self._ended.clear()
