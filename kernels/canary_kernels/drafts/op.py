"""Front door of drafts: what is kept of a target's forward until its draft model has run."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.drafts import reference

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """How far behind a request's tokens drafting may write."""

    ahead: int  # slots
    limit: int  # positions from here on are not written: the last one before is, instead
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """Copies of a target's inputs. Allocated once; the step under way has the first places of each."""

    prefix_lens: Tensor  # [max_requests]
    extend_lens: Tensor  # [max_requests]
    token_starts: Tensor  # [max_requests + 1]
    input_ids: Tensor  # [max_tokens]
    positions: Tensor  # [max_tokens]
    slots: Tensor  # int64 [max_tokens + max_requests * ahead]; the target's, then each request's behind them
    reach: AttentionMetadata
    memo: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def allocate(
        cls,
        requests: int,
        tokens: int,
        reach: AttentionMetadata,
        kinds: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> DraftMemory:
        """For at most so many. `kinds`: integer types of lengths, input ids and positions."""
        length, token, place = kinds
        return cls(
            prefix_lens=torch.empty(requests, dtype=length, device=device),
            extend_lens=torch.empty(requests, dtype=length, device=device),
            token_starts=torch.empty(requests + 1, dtype=length, device=device),
            input_ids=torch.empty(tokens, dtype=token, device=device),
            positions=torch.empty(tokens, dtype=place, device=device),
            slots=torch.empty(tokens + requests * reach.ahead, dtype=torch.int64, device=device),
            reach=reach,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStep:
    """A target's forward, as the group of its draft sees it. Integers."""

    prefix_lens: Tensor  # [num_requests]
    extend_lens: Tensor  # [num_requests]
    token_starts: Tensor  # [num_requests + 1]
    input_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_table: Tensor  # [>= num_requests, width]; row i is request i's; page numbers when page_size > 1
    out_slots: Tensor  # [num_tokens]; -1 = skip


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.drafts.kernel")


def keep_target(backend: Backend, memory: DraftMemory, step: TargetStep) -> Tensor:
    """Copy the inputs, and list the slots that drafting may write.

    int64 [num_tokens + num_requests * ahead], part of the memory: the target's own, then those of each
    request's next positions; -1 where the table has no entry for one. Raises KernelArgumentError for
    a step that the memory has no room for.
    """
    requests, tokens = step.prefix_lens.shape[0], step.input_ids.shape[0]
    if requests > memory.prefix_lens.shape[0] or tokens > memory.input_ids.shape[0]:
        raise KernelArgumentError(
            f"a step of {requests} requests and {tokens} tokens; the rule is at most "
            f"{memory.prefix_lens.shape[0]} and {memory.input_ids.shape[0]}; allocate for the engine's limits"
        )
    if backend is Backend.TRITON:
        _kernel().keep_target(memory, step)
    else:
        reference.keep_target(memory, step)
    return memory.slots[: tokens + requests * memory.reach.ahead]
