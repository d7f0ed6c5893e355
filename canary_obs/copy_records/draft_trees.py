"""Trees of drafts, whose accepted nodes are moved to the front of their request's new slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView


class SlotMap(Protocol):
    """A group's slots by those of the request table, like a tensor of them; 0 = none."""

    def __getitem__(self, slots: Tensor, /) -> Tensor:
        """Integers, of the same shape."""


class DraftTrees:
    """Follows the nodes of trees to where accepted ones are moved: each slot's token and position.

    A verification is shown with its nodes in the order of their slots. When the accepted ones have moved,
    their path is shown as a forward of its own, with what was found in its slots.
    """

    def __init__(self, groups: Mapping[str, SlotMap | None], table: Tensor, num_slots: int) -> None:
        """`groups`: each one's own slots by those of the table, 0 = none; None = they are the same."""
        self.groups, self._table = groups, table
        self._nodes = torch.zeros((2, num_slots), dtype=torch.int64)  # tokens, positions
        self._shown: StepView | None = None
        self.paths = 0  # batches with an accepted path

    def verifying(self, view: StepView, slots: Tensor, positions: Tensor) -> None:
        """A forward of trees is shown; `slots` and the positions that the model was given, int64 [n] each."""
        self._shown = view
        self._nodes[:, slots] = torch.stack((view.input_ids.to(torch.int64), positions.to(torch.int64)))

    def moved(self, destination: Tensor, source: Tensor, observer: Observer) -> None:
        """KV was copied between slots of the request table, int64 [n] each; 0 = nothing."""
        real = (destination > 0) & (source > 0) & (destination != source)
        destination, source = destination[real].to(torch.int64), source[real].to(torch.int64)
        if destination.numel():
            self._nodes[:, destination] = self._nodes[:, source]
            for name, own in self.groups.items():
                observer.copied(name, own_slots(own, source), own_slots(own, destination))

    def path(self, accepted: Tensor) -> StepView | None:
        """The view of the accepted path, `accepted` tokens [num_requests]; None = no trees were shown."""
        shown, self._shown = self._shown, None
        if shown is None:
            return None
        self.paths += 1
        extends = accepted.to(torch.int64)
        starts = torch.zeros_like(shown.token_starts)
        torch.cumsum(extends, 0, out=starts[1:])
        slots = slots_after(self._table, shown.rows, shown.prefix_lens, extends)
        slots = slots[slots >= 0]
        tokens, positions = self._nodes[:, slots]
        return replace(
            shown,
            extend_lens=extends,
            token_starts=starts,
            input_ids=tokens,
            positions=positions,
            groups={
                name: replace(shown.groups[name], out_slots=own_slots(own, slots))
                for name, own in self.groups.items()
            },
        )


def slots_after(table: Tensor, rows: Tensor, prefixes: Tensor, counts: Tensor) -> Tensor:
    """int64 [requests * most]: `counts` slots of each request from `prefixes` on; -1 = it has no more."""
    steps = torch.arange(int(counts.max()) if counts.numel() else 0)
    columns = prefixes.to(torch.int64)[:, None] + steps
    wanted = (steps < counts[:, None]) & (columns < table.shape[1])
    found = table[rows[:, None], columns.clamp(max=table.shape[1] - 1)].to(torch.int64)
    return torch.where(wanted, found, -1).flatten()


def own_slots(own: SlotMap | None, slots: Tensor) -> Tensor:
    """A group's slots, int64 [n], by those of the request table; -1 = none."""
    if own is None:
        return slots
    found = own[slots].to(torch.int64)
    return torch.where(found > 0, found, -1)
