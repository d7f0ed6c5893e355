"""StepViews of SGLang's forward batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from canary_obs.copy_records.draft_trees import DraftTrees, own_slots
from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.sglang.device_states import DeviceStates, TrackedStates
from canary_obs.engines.sglang.entry_steps import EntrySteps
from canary_obs.engines.sglang.groups import SglangGroup
from canary_obs.engines.sglang.request_chains import RequestChains
from canary_obs.engines.sglang.states import StateSteps
from canary_obs.errors import UnsupportedEngine

EXTENDING = frozenset({"EXTEND", "MIXED"})  # in MIXED a request that decodes extends by one token


class BatchViews:
    """Views of the batch's own tensors; lengths and window slots are written to the same memory each time."""

    def __init__(
        self,
        runner: Any,
        groups: Sequence[SglangGroup],
        trees: DraftTrees | None = None,
        *,
        own_tables: bool = True,
    ) -> None:
        """`trees`: is given the nodes of each verification; None = drafts do not branch.

        `own_tables`: whether to allocate memory for groups that have other slots than the request table.
        """
        self._trees = trees
        self._table = runner.req_to_token_pool.req_to_token
        self._groups = groups
        # The slots of groups that have slots of their own, request for request like the table itself.
        self._own_tables = {
            group.view.name: torch.zeros_like(self._table)
            for group in groups
            if own_tables and group.own_slots is not None and group.by_row is None
        }
        ratios = {group.ratio for group in groups} - {1}
        self._entries = {ratio: EntrySteps(self._table, ratio) for ratio in sorted(ratios)}
        most = int(self._table.shape[0])
        lengths = torch.zeros((4, most + 1), dtype=torch.int64)
        self._prefixes, self._extends, self._starts, self._ones = lengths
        self._ones.fill_(1)
        self._counting = torch.arange(most + 1)
        self._chains = RequestChains()
        self._states = {
            group.view.name: StateSteps(group.by_row, self.step_types, group.own_slots)
            for group in groups
            if group.by_row is not None and own_tables
        }
        self._names: tuple[list[Any], list[str]] = [], []  # requests of the last batch, and their names
        # On a GPU, where the model has states; those that forwards leave for the prefix cache, if they do.
        self.states: DeviceStates | None = None
        self.tracked: TrackedStates | None = None
        self.keeps_last = False  # for `SeveralDrafts`
        self.last: StepView | None = None  # the newest view

    @property
    def step_types(self) -> StepTypes:
        """Types of the views to come."""
        return StepTypes(
            slot_table=self._table.dtype,
            rows=torch.int64,
            lengths=torch.int64,
            input_ids=torch.int64,
            positions=torch.int64,
            out_slots=torch.int64,
            has_digests=True,
            expected_ids=None,
            has_known_tokens=True,
        )

    def state_forwards(self, counted: int) -> int:
        """Forwards that have to be shown with states, of those that the scheduler has counted so far."""
        shown = 0 if self.tracked is None else self.tracked.shown
        return counted + shown - (0 if self.states is None else self.states.may_leave_out(counted))

    def build(self, batch: Any, requests: Sequence[Any]) -> StepView:
        """The view of a forward batch of these requests.

        Raises UnsupportedEngine for a forward mode that is not covered yet, LookupError for other requests.
        """
        count, names = self._checked_requests(batch, requests)
        positions, verifies = batch.positions, batch.forward_mode.name == "TARGET_VERIFY"
        prefixes, extends = self._prefixes[:count], self._extends[:count]
        if batch.forward_mode.is_decode():
            # Not from the positions: they are what is to be checked.
            torch.sub(batch.seq_lens, 1, out=prefixes)
            extends, starts = self._ones[:count], self._counting[: count + 1]
        elif verifies:
            prefixes.copy_(batch.seq_lens)
            extends.fill_(width := int(batch.spec_info.draft_token_num))
            starts = self._counting[: count + 1] * width
            if self._trees is not None:  # the model is given the nodes' depths
                positions = (prefixes[:, None] + torch.arange(width)).flatten()
        elif (mode := batch.forward_mode.name) in EXTENDING:
            prefixes.copy_(batch.extend_prefix_lens)
            extends.copy_(batch.extend_seq_lens)
            starts = self._starts[: count + 1]
            torch.cumsum(extends, 0, out=starts[1:])
        else:
            raise UnsupportedEngine(f"SGLang's forward mode {mode} is not covered yet")
        before = prefixes.numpy()
        ends = np.add(before, extends.numpy())
        digests, known_lens, known_digests = self._chains.advance(requests, before, ends).tensors()
        steps = {
            ratio: entries.build(batch, requests, before, ends) for ratio, entries in self._entries.items()
        }
        view = StepView(
            request_ids=names,
            rows=batch.req_pool_indices,
            prefix_lens=prefixes,
            extend_lens=extends,
            token_starts=starts,
            input_ids=batch.input_ids,
            positions=positions,
            digests=digests,
            groups={
                group.view.name: steps.get(group.ratio) or self._step(group, batch, int(ends.max()))
                for group in self._groups
                if group.by_row is None
            }
            | {name: states.step(requests, names) for name, states in self._states.items()},
            known_lens=known_lens,
            known_digests=known_digests,
        )
        if self._trees is not None and verifies:
            self._trees.verifying(view, batch.out_cache_loc, batch.positions)
        if self.keeps_last:
            self.last = replace(view, input_ids=view.input_ids.clone())  # the draft models' rotate in place
        return view

    def _checked_requests(self, batch: Any, requests: Sequence[Any]) -> tuple[int, list[str]]:
        """How many, and their names: the same list for the same requests.

        Raises LookupError when the batch has others.
        """
        if self._names[0] != requests:
            self._names = list(requests), [request.rid for request in requests]
        count, names = int(batch.batch_size), self._names[1]
        if batch.rids != names or count != batch.req_pool_indices.shape[0]:
            raise LookupError(
                f"the forward has {count} requests, {batch.rids}; its scheduler handed out {names}"
            )
        return count, names

    def _step(self, group: SglangGroup, batch: Any, longest: int) -> GroupStep:
        if group.own_slots is None:
            return GroupStep(slot_table=self._table, out_slots=batch.out_cache_loc)
        own, rows = self._own_tables[group.view.name], batch.req_pool_indices
        own[rows, :longest] = group.own_slots[self._table[rows, :longest]].to(own.dtype)
        # Slot 0 takes writes that nobody reads: a token whose KV went there has none.
        # In unified memory `out_cache_loc` has physical slots of the full layers.
        virtual = getattr(batch, "out_cache_loc_virtual", None)
        written = own_slots(group.own_slots, batch.out_cache_loc if virtual is None else virtual)
        return GroupStep(slot_table=own, out_slots=written)
