"""Entry point of decode: keep a batch that decodes until its checks have run."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.decode import reference
from canary_kernels.decode.steps import DecodeMemory, DecodeStep, Known

if TYPE_CHECKING:
    from types import ModuleType


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.decode.kernel")


def keep_decode(backend: Backend, memory: DecodeMemory, step: DecodeStep, known: Known) -> None:
    """Copy rows of the table up to each request's length, lengths and tokens; one launch.

    What is known becomes the host's columns or, with their tokens, what it was and one token more; the digest
    of a request then covers what precedes the forward. A row outside the table has the slot -1 everywhere.
    Raises KernelArgumentError for a batch, or window slots, that the memory has no room for.
    """
    requests = step.rows.shape[0]
    if requests > memory.prefix_lens.shape[0]:
        raise KernelArgumentError(
            f"a batch of {requests} requests; the rule is at most {memory.prefix_lens.shape[0]}; "
            "allocate for the engine's table"
        )
    if (tokens := step.input_ids.shape[0]) != requests * step.added or tokens > memory.tokens.shape[1]:
        raise KernelArgumentError(
            f"{tokens} tokens of {requests} requests; the rule is {step.added} of each, and at most "
            f"{memory.tokens.shape[1]}; allocate for as many as a forward adds"
        )
    if (given := step.window_slots is not None) is not (memory.windows is not None):
        raise KernelArgumentError(
            f"window slots {'without' if given else 'left out, with'} memory for them; the rule is both or "
            "none; allocate for the engine's groups"
        )
    if backend is Backend.TRITON:
        _kernel().keep_decode(memory, step, known)
    else:
        reference.keep_decode(memory, step, known)
