"""Entry points of drafts: keep a target's forward until its draft model has run."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from torch import Tensor

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.drafts import reference
from canary_kernels.drafts.steps import DraftMemory, TargetStep

if TYPE_CHECKING:
    from types import ModuleType


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
    return memory.slots[: tokens + requests * memory.reserve.ahead]
