"""Several draft models of one SGLang scheduler, each with KV of its own (multi-layer EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from canary_obs.copy_records.draft_trees import own_slots
from canary_obs.engine_api.views import GroupStep, StepView
from canary_obs.engines.sglang.groups import FULL, SWA, draft_name, has_windows
from canary_obs.engines.sglang.window_slots import WindowSlots


class TargetViews(Protocol):
    """Views of the target's forwards."""

    keeps_last: bool  # whether `last` is set
    last: StepView | None  # the newest, with a copy of its inputs


def are_several(runners: Sequence[Any]) -> bool:
    """Whether these model runners draft one after another: also one alone that has a number among them."""
    return any(getattr(runner, "draft_model_idx", None) is not None for runner in runners)


class SeveralDrafts:
    """Views of the forwards in which each draft model extends its KV by the target's new tokens.

    At the slot of position p, model i is given the token of p + 1 + i: at the last places of a request, or of
    a chunk of its prompt, one that was only drafted. SGLang does not write these slots again when another
    token follows, and hands them out by the tokens of p and p + 1. So a slot's entry is its own token, as in
    the target's forward of the same batch, rejected ones included; what the model is given is not compared.
    Nothing else writes there: the drafts of the next verification come from these very forwards.
    """

    def __init__(self, target: TargetViews) -> None:
        self._target = target
        target.keeps_last = True

    def begin(self) -> None:
        """A batch is next: its target's forward has yet to come."""
        self._target.last = None

    def build(self, runner: Any, batch: Any) -> StepView:
        """Of a forward batch of this model runner. Raises LookupError where the target's was another one."""
        shown = self._target.last
        if shown is None:
            raise LookupError(f"{draft_name(runner)} runs before the target, or the target was not shown")
        if shown.input_ids.shape != batch.out_cache_loc.shape or len(shown.rows) != len(
            batch.req_pool_indices
        ):
            raise LookupError(
                f"{draft_name(runner)} extends {len(batch.req_pool_indices)} requests by "
                f"{len(batch.out_cache_loc)} tokens, the target {len(shown.rows)} by {len(shown.input_ids)}"
            )
        windowed = has_windows(runner.token_to_kv_pool)
        allocator = runner.token_to_kv_pool_allocator
        own = WindowSlots(allocator.full_to_swa_index_mapping) if windowed else None
        step = GroupStep(
            slot_table=shown.groups[SWA if windowed else FULL].slot_table,
            out_slots=own_slots(own, batch.out_cache_loc),
        )
        return replace(
            shown,
            rows=batch.req_pool_indices,
            positions=batch.positions,
            groups={draft_name(runner): step},
            known_lens=None,
            known_digests=None,
        )
