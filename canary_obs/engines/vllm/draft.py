"""Layers of a draft model, which proposes tokens after the target has run: groups of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canary_kernels.drafts import DraftMemory, DraftReserve, TargetStep, keep_target
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.toolkit.device_digests import backend_for
from canary_obs.engines.toolkit.idle_thread import IdleThread

if TYPE_CHECKING:
    from canary_obs.engines.vllm.groups import FoundGroup

# Drafters of both model runners; EAGLE's also run EAGLE-3 heads and MTP layers. They write the slots of the
# target's tokens and as many behind them as they propose, all before `sample_tokens` returns.
# V2's for a draft model has another name in 0.31.
_TRIED = frozenset(
    {
        "DraftModelProposer",
        "EagleProposer",
        "EagleSpeculator",
        "MTPSpeculator",
        "PlainDraftModelSpeculator",
        "StandaloneARSpeculator",
    }
)


def drafts_are_known(runner: Any) -> bool:
    """Whether it is known which slots drafting writes, and when."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    parallel = getattr(runner.speculative_config, "parallel_drafting", False)
    return type(drafter).__name__ in _TRIED and not parallel


class DraftGroups:
    """Shows the drafter's work as one forward over the target's tokens, once drafting is over.

    When the target begins, every slot that drafting may write loses its record. What the drafter wrote for
    tokens that were rejected counts like the rest: the next step takes those slots' records again.
    Launches only; all memory is taken at construction.
    """

    def __init__(self, runner: Any, found: Sequence[FoundGroup], types: StepTypes) -> None:
        self._backend, self._device, self._types = backend_for(runner.device), runner.device, types
        kinds = types.lengths, types.input_ids, types.positions
        ahead, limit = self.reach(runner), int(runner.max_model_len)
        # The target's inputs: the runner may use their memory again while it drafts.
        self._memory = {
            group.view.name: DraftMemory.allocate(
                int(runner.max_num_reqs),
                int(runner.max_num_tokens),
                DraftReserve(ahead=ahead, limit=limit, page_size=group.view.page_size),
                kinds,
                runner.device,
            )
            for group in found
        }
        self._view: StepView | None = None

    @staticmethod
    def reach(runner: Any) -> int:
        """How many slots behind the target's drafting may write."""
        return int(runner.speculative_config.num_speculative_tokens)

    @property
    def pending(self) -> bool:
        """Whether the target has run and drafting is not over."""
        return self._view is not None

    def compile(self) -> None:
        """A step of no request: compiles what `begin` launches."""
        types = self._types

        def nothing(kind: torch.dtype, length: int = 0) -> Tensor:
            return torch.zeros(length, dtype=kind, device=self._device)

        step = TargetStep(
            prefix_lens=nothing(types.lengths),
            extend_lens=nothing(types.lengths),
            token_starts=nothing(types.lengths, 1),
            input_ids=nothing(types.input_ids),
            positions=nothing(types.positions),
            slot_table=nothing(types.slot_table, 1)[None],
            out_slots=nothing(types.out_slots),
        )
        for memory in self._memory.values():
            keep_target(self._backend, memory, step)

    def begin(self, view: StepView, observer: Observer) -> StepView:
        """The target is about to run; returns its forward without the draft groups."""
        steps = dict(view.groups)
        own = {name: steps.pop(name) for name in self._memory}
        target = replace(view, groups=steps)
        count, total = len(target.request_ids), target.input_ids.shape[0]
        groups: dict[str, GroupStep] = {}
        for name, memory in self._memory.items():
            step = TargetStep(
                prefix_lens=target.prefix_lens,
                extend_lens=target.extend_lens,
                token_starts=target.token_starts,
                input_ids=target.input_ids,
                positions=target.positions,
                slot_table=own[name].slot_table,
                out_slots=own[name].out_slots,
            )
            written = keep_target(self._backend, memory, step)
            observer.invalidated(name, written)
            groups[name] = replace(own[name], out_slots=written[:total])
        memory = next(iter(self._memory.values()))  # all hold the same inputs
        self._view = replace(
            target,
            prefix_lens=memory.prefix_lens[:count],
            extend_lens=memory.extend_lens[:count],
            token_starts=memory.token_starts[: count + 1],
            input_ids=memory.input_ids[:total],
            positions=memory.positions[:total],
            groups=groups,
        )
        return target

    def end(self, observer: Observer) -> None:
        """Drafting is over, or was left out."""
        view, self._view = self._view, None
        if view is not None:
            observer.before_forward(view)
            observer.after_forward(view)

    def fail(self, observer: Observer) -> None:
        """Nobody knows what was drafted: adopt it, unverified."""
        view, self._view = self._view, None
        if view is not None:
            for name, step in view.groups.items():
                observer.received(name, step.out_slots)

    def around_sampling(
        self, lock: threading.Lock, observer: Observer, idle: IdleThread
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What wraps the runner's `sample_tokens`, within which it drafts; the engine's step ends with it."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def sample_tokens(*given: Any, **named: Any) -> Any:
                with lock:
                    try:
                        result = original(*given, **named)
                    except BaseException:
                        self.fail(observer)
                        raise
                    finally:
                        idle.last_step = time.monotonic()
                    if self.pending:
                        self.end(observer)
                        observer.after_step()
                return result

            return sample_tokens

        return make
