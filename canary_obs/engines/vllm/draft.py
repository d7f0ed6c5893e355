"""The forwards of a draft model, which proposes tokens after the target has run: a group of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from canary_obs.engines.adapter import Observer
from canary_obs.views import GroupStep, StepView

if TYPE_CHECKING:
    from canary_obs.engines.vllm.groups import FoundGroup

Guard = Callable[[Observer, Callable[[], StepView]], "StepView | None"]


def draft_module(runner: Any) -> nn.Module | None:
    """The draft model whose forwards can be shown: fed the request's own tokens, run by the V1 CPU runner."""
    drafter = getattr(runner, "drafter", None)
    module = getattr(drafter, "model", None)
    # EAGLE and its kind feed hidden states and shifted tokens, parallel drafting feeds placeholders.
    plain = not any(
        getattr(drafter, name, True)
        for name in ("pass_hidden_states_to_model", "parallel_drafting", "use_heterogeneous_vocab")
    )
    return module if plain and isinstance(module, nn.Module) and runner.device.type == "cpu" else None


class DraftForwards:
    """Follows a draft model by hooks on its module."""

    def __init__(self, module: nn.Module, group: FoundGroup, guard: Guard) -> None:
        self._module, self._group, self._guard = module, group, guard
        self._target: StepView | None = None
        self._first = False
        self._open: StepView | None = None

    def follow(self, observer: Observer) -> Callable[[], None]:
        """Install the hooks; returns what removes them."""

        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._target is not None and not given:
                self._open = self._guard(observer, lambda: self._view(**named))
                if self._open is not None:
                    observer.before_forward(self._open)

        def after(*_: Any) -> None:
            view, self._open = self._open, None
            if view is not None:
                observer.after_forward(view)

        hooks = (
            self._module.register_forward_pre_hook(before, with_kwargs=True),
            self._module.register_forward_hook(after),
        )

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        return remove

    def begin(self, target: StepView, out_slots: Tensor, observer: Observer) -> None:
        """The target is about to write these slots. Drafting may be left out, so the draft's are adopted."""
        self._target, self._first = target, True
        observer.received(self._group.view.name, out_slots)

    def end(self, observer: Observer) -> None:
        """Drafting is over, or failed."""
        view, self._target, self._open = self._open, None, None
        if view is not None:
            observer.forward_failed(view)

    def _view(self, *, input_ids: Tensor, positions: Tensor, **_: Any) -> StepView:
        from vllm.forward_context import get_forward_context

        assert self._target is not None
        context, layer = get_forward_context(), self._group.layers[0]
        batch, count = context.attn_metadata[layer], len(self._target.request_ids)
        total, starts = batch.num_actual_tokens, batch.query_start_loc[: count + 1]
        slots = context.slot_mapping[layer][:total]
        # Behind the tokens that the target accepted lie rejected ones and padding, which are not written.
        written = torch.zeros(total + 1, dtype=starts.dtype, device=starts.device)
        torch.cumsum(slots >= 0, 0, dtype=starts.dtype, out=written[1:])
        view = replace(
            self._target,
            prefix_lens=batch.seq_lens[:count] - starts.diff(),
            extend_lens=written[starts.long()].diff(),
            token_starts=starts,
            input_ids=input_ids[:total],
            positions=positions[:total],
            # Later passes go on from the records of the passes before them.
            digests=self._target.digests if self._first else None,
            groups={self._group.view.name: GroupStep(slot_table=batch.block_table, out_slots=slots)},
        )
        self._first = False
        return view
