"""Layers of a draft model, which proposes tokens after the target has run: groups of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canary_obs.engines.adapter import Observer
from canary_obs.engines.vllm.idle import IdleThread
from canary_obs.views import GroupStep, StepTypes, StepView

if TYPE_CHECKING:
    from canary_obs.engines.vllm.groups import FoundGroup

# Drafters of both model runners; EAGLE's also run EAGLE-3 heads and MTP layers. They write the slots of the
# target's tokens and as many behind them as they propose, all before `sample_tokens` returns.
_TRIED = frozenset(
    {"DraftModelProposer", "EagleProposer", "EagleSpeculator", "MTPSpeculator", "StandaloneARSpeculator"}
)


def drafts_are_known(runner: Any) -> bool:
    """Whether it is known which slots drafting writes, and when."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    parallel = getattr(runner.speculative_config, "parallel_drafting", False)
    return type(drafter).__name__ in _TRIED and not parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """A group's share of what is kept from a target's forward until drafting is over."""

    group: FoundGroup
    slots: Tensor  # int64 [max_tokens + max_requests * ahead]; the target's, then those drafts may write


class DraftGroups:
    """Shows the drafter's work as one forward over the target's tokens, once drafting is over.

    When the target begins, every slot that drafting may write loses its record. What the drafter wrote for
    tokens that were rejected counts like the rest: the next step takes those slots' records again.
    Launches only; all memory is taken at construction.
    """

    def __init__(self, runner: Any, found: Sequence[FoundGroup], types: StepTypes) -> None:
        requests, tokens, device = int(runner.max_num_reqs), int(runner.max_num_tokens), runner.device
        ahead = self.reach(runner)
        self._limit = int(runner.max_model_len)
        self._own = tuple(
            _Own(
                group=group,
                slots=torch.empty(tokens + requests * ahead, dtype=torch.int64, device=device),
            )
            for group in found
        )
        # The target's inputs: the runner may use their memory again while it drafts.
        self._lengths = torch.empty((2, requests), dtype=types.lengths, device=device)
        self._starts = torch.empty(requests + 1, dtype=types.lengths, device=device)
        self._ids = torch.empty(tokens, dtype=types.input_ids, device=device)
        self._positions = torch.empty(tokens, dtype=types.positions, device=device)
        self._ahead = torch.arange(ahead, device=device)
        self._ends = torch.empty(requests, dtype=torch.int64, device=device)
        self._places, self._pages = torch.empty((2, requests, ahead), dtype=torch.int64, device=device)
        self._entries = torch.empty((requests, ahead), dtype=types.slot_table, device=device)
        self._view: StepView | None = None

    @staticmethod
    def reach(runner: Any) -> int:
        """How many slots behind the target's drafting may write."""
        return int(runner.speculative_config.num_speculative_tokens)

    @property
    def pending(self) -> bool:
        """Whether the target has run and drafting is not over."""
        return self._view is not None

    def begin(self, view: StepView, observer: Observer) -> StepView:
        """The target is about to run; returns its forward without the draft groups."""
        steps = dict(view.groups)
        own_steps = [steps.pop(own.group.view.name) for own in self._own]
        target = replace(view, groups=steps)
        count, total = len(target.request_ids), target.input_ids.shape[0]
        prefix, extend = self._lengths[0, :count], self._lengths[1, :count]
        kept = (
            (prefix, target.prefix_lens),
            (extend, target.extend_lens),
            (self._starts[: count + 1], target.token_starts),
            (self._ids[:total], target.input_ids),
            (self._positions[:total], target.positions),
        )
        for memory, values in kept:
            memory.copy_(values)
        torch.add(prefix, extend, out=self._ends[:count])
        places, pages, entries = self._places[:count], self._pages[:count], self._entries[:count]
        torch.add(self._ends[:count, None], self._ahead, out=places)
        places.clamp_(max=self._limit - 1)
        groups: dict[str, GroupStep] = {}
        for own, step in zip(self._own, own_steps, strict=True):
            name, page_size = own.group.view.name, own.group.view.page_size
            written = own.slots[: total + places.numel()]
            torch.div(places, page_size, rounding_mode="floor", out=pages)
            torch.gather(step.slot_table[:count], 1, pages, out=entries)
            # Slot = entry * page_size + place - page * page_size.
            behind = written[total:].view(places.shape)
            torch.sub(entries, pages, out=behind)
            behind.mul_(page_size).add_(places)
            written[:total].copy_(step.out_slots)
            observer.invalidated(name, written)
            groups[name] = replace(step, out_slots=written[:total])
        self._view = replace(
            target,
            prefix_lens=prefix,
            extend_lens=extend,
            token_starts=self._starts[: count + 1],
            input_ids=self._ids[:total],
            positions=self._positions[:total],
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
