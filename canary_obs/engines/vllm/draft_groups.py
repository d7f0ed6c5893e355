"""Groups of a draft model's layers, which are written after the target's forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.drafts import DraftMemory, DraftReserve, TargetStep, keep_target
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.toolkit.device_digests import backend_for
from canary_obs.engines.vllm.drafters import drafted_tokens
from canary_obs.engines.vllm.groups import VllmGroup


class DraftGroups:
    """Reports drafting as one forward over the target's tokens, after it ended.

    Before the target's forward the records of every slot that drafting may write are cleared. Slots of
    tokens that are rejected are treated like the others: the next step clears their records again.
    Nothing waits for the device; all memory is allocated at construction.
    """

    def __init__(self, runner: Any, groups: Sequence[VllmGroup], types: StepTypes) -> None:
        self._backend, self._device, self._types = backend_for(runner.device), runner.device, types
        dtypes = types.lengths, types.input_ids, types.positions
        ahead, limit = drafted_tokens(runner), int(runner.max_model_len)
        # Copies of the target's inputs: the runner may reuse their memory while it drafts.
        self._memory = {
            group.view.name: DraftMemory.allocate(
                int(runner.max_num_reqs),
                int(runner.max_num_tokens),
                DraftReserve(ahead=ahead, limit=limit, page_size=group.view.page_size),
                dtypes,
                runner.device,
            )
            for group in groups
        }
        self._view: StepView | None = None  # of the drafting under way

    @property
    def pending(self) -> bool:
        """Whether a target's forward began, and drafting after it has not ended."""
        return self._view is not None

    def warm_up(self) -> None:
        """Launch once what `begin` launches, for a step without requests."""
        types = self._types

        def nothing(dtype: torch.dtype, length: int = 0) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=self._device)

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
        """The target's forward is next; returns its view without the draft groups."""
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
            known_lens=None,  # the target's forward compares the same tokens
            known_digests=None,
            groups=groups,
        )
        return target

    def end(self, observer: Observer) -> None:
        """Drafting ended, or was left out in this step."""
        view, self._view = self._view, None
        if view is not None:
            observer.before_forward(view)
            observer.after_forward(view)

    def fail(self, observer: Observer) -> None:
        """What drafting wrote is unknown: its slots count as unverified."""
        view, self._view = self._view, None
        if view is not None:
            observer.forward_failed(view)
