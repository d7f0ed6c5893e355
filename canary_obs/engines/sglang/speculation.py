"""Speculation in SGLang: what its hooks do besides, before a batch and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_obs.copy_records.draft_trees import DraftTrees, slots_after
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.sglang.built_view import built_view
from canary_obs.engines.sglang.draft_views import DraftViews
from canary_obs.engines.sglang.groups import DRAFT
from canary_obs.engines.sglang.left_out import LeftOut
from canary_obs.engines.sglang.physical_slots import pool_bytes
from canary_obs.engines.sglang.several_drafts import SeveralDrafts, TargetViews, are_several
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.shown_forward import shown_forward

# Forwards of a draft model that write what stays; steps of drafting are DECODE.
_EXTENDING = frozenset({"EXTEND", "DRAFT_EXTEND_V2"})
KNOWN_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")


def draft_runners(scheduler: Any) -> tuple[Any, ...]:
    """Model runners with KV of their own that draft for this scheduler's; n-grams have none."""
    if (worker := getattr(scheduler, "draft_worker", None)) is None:
        return ()
    if hasattr(worker, "_draft_model_runners"):
        return tuple(worker._draft_model_runners())
    return tuple(worker.draft_worker.draft_runners)  # SGLang 0.5.16, of what is covered there


def drafts_trees(arguments: Any) -> bool:
    """Whether drafts may branch, so that accepted tokens are moved to their places."""
    algorithm = arguments.speculative_algorithm
    return algorithm == "NGRAM" or (algorithm is not None and int(arguments.speculative_eagle_topk) > 1)


def drafted_tokens(arguments: Any) -> int:
    """Tokens of each request that a forward verifies, the one that precedes the drafts among them."""
    return 0 if arguments.speculative_algorithm is None else int(arguments.speculative_num_draft_tokens)


def drafts_left_out(scheduler: Any) -> tuple[LeftOut, ...]:
    """Layers of its draft models, on GPUs."""
    runners = draft_runners(scheduler)
    if not runners:
        return ()
    held = sum(pool_bytes(runner.token_to_kv_pool) for runner in runners)
    reason = "on GPUs this adapter does not follow what draft models write"
    return (LeftOut(what="layers of draft models", bytes=held, reason=reason),)


class Speculation:
    """What the hooks of a scheduler that speculates do besides: before a batch, and after it."""

    def __init__(
        self, scheduler: Any, observer: Observer, trees: DraftTrees | None, target: TargetViews
    ) -> None:
        """`trees`: None = drafts do not branch. `target`: views of the forwards that verify."""
        self._target, self._observer, self.trees = scheduler.tp_worker.model_runner, observer, trees
        self._table = self._target.req_to_token_pool.req_to_token
        self._runners = draft_runners(scheduler)
        self._several = SeveralDrafts(target) if are_several(self._runners) else None
        alone = self._runners and self._several is None
        self._views = DraftViews(scheduler, self._table) if alone else None
        self._requests: Sequence[Any] = ()  # of the batch under way

    def wrap(self, patches: MethodPatches) -> None:
        """Follow drafts, and the moves of accepted tokens, from now on; `patches` undoes that."""
        for runner in self._runners:
            patches.wrap(runner, "forward", partial(self._around_forward, runner))
        if self.trees is not None:
            patches.wrap(self._target.token_to_kv_pool, "move_kv_cache", self._around_move)

    def begin(self, batch: Any) -> None:
        """A batch is next. What drafting may write from now on has no record until it is shown."""
        self._requests = batch.reqs
        if self._several is not None:
            self._several.begin()
        if self._views is None or not batch.forward_mode.is_decode():
            return
        reserved = torch.tensor([int(request.kv.kv_allocated_len) for request in batch.reqs])
        counts = (reserved - batch.seq_lens).clamp(min=0)
        self._observer.invalidated(
            DRAFT, slots_after(self._table, batch.req_pool_indices, batch.seq_lens, counts)
        )

    def end(self, result: Any) -> None:
        """The batch was run."""
        if self.trees is None or getattr(result, "accept_lens", None) is None:
            return
        view = self.trees.path(result.accept_lens)
        if view is not None:
            self._observer.before_forward(view)
            self._observer.after_forward(view)

    def _around_forward(self, runner: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def view_of(batch: Any) -> StepView | None:
            if batch.forward_mode.name not in _EXTENDING:
                return None
            if self._several is not None:
                return built_view(partial(self._several.build, runner, batch), self._observer)
            assert self._views is not None
            return built_view(partial(self._views.build, batch, self._requests), self._observer)

        return shown_forward(original, view_of, self._observer)

    def _around_move(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move_kv_cache(tgt_loc: Tensor, src_loc: Tensor, *more: Any, **named: Any) -> Any:
            assert self.trees is not None
            try:
                self.trees.moved(tgt_loc, src_loc, self._observer)
            except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
                self._observer.fault("announce", error)
            return original(tgt_loc, src_loc, *more, **named)

        return move_kv_cache
