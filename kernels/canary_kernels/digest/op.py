"""Front door of digest: the chain over each request's own prefix, advanced by what is new each step."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.checks import Backend
from canary_kernels.digest import reference

if TYPE_CHECKING:
    from types import ModuleType

Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMemory:
    """One row per request that an engine can hold. Allocated once; steps on one stream share the results."""

    chains: Tensor  # int64 [max_requests]; chain over the first counts[row] tokens
    counts: Tensor  # int64 [max_requests]; 0 = start from the anchor
    digests: Tensor  # int64 [max_requests]; result of a step, by place in the batch
    prefix_lens: Tensor  # int32 [max_requests]; likewise
    extend_lens: Tensor  # int32 [max_requests]; likewise
    tails: Tensor  # int32 [max_requests, width]; fed last, of which the engine may yet reject some
    memo: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def allocate(cls, max_requests: int, device: torch.device, tail: int = 0) -> DigestMemory:
        """Zeroed. `tail`: tokens that the engine may reject of what it feeds a request in one step."""
        kinds = torch.int64, torch.int64, torch.int64, torch.int32, torch.int32
        names = "chains", "counts", "digests", "prefix_lens", "extend_lens"
        columns = (torch.zeros(max_requests, dtype=kind, device=device) for kind in kinds)
        tails = torch.zeros((max_requests, tail), dtype=torch.int32, device=device)
        return cls(tails=tails, **dict(zip(names, columns, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLists:
    """A step of an engine that keeps every request's tokens on the device. Integers."""

    rows: Tensor  # [num_requests]; row of the lists
    tokens: Tensor  # [max_requests, width]; the engine's own token lists
    computed: Tensor  # [max_requests]; tokens in the cache before this forward, by row
    token_starts: Tensor  # [num_requests + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTokens:
    """A step of an engine that has only the forward's inputs on the device. Integers."""

    places: Tensor  # int64 [3, num_requests]: row; 1 = the chain starts over; where it starts then
    input_ids: Tensor  # [num_tokens]
    token_starts: Tensor  # [num_requests + 1]
    prefix_lens: Tensor  # [num_requests]


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.digest.kernel")


@functools.cache
def _cpu() -> ModuleType:
    """numba is imported, and all compiled, on first use."""
    return importlib.import_module("canary_kernels.digest.cpu")


def extend_chains(backend: Backend, tokens: Ints, ends: Ints, counts: Ints, chains: Ints) -> None:
    """Advance chains over host lists: chains[i] covers counts[i] ids of row i of tokens, then ends[i].

    tokens int32 [rows, width], ends int32 [n], counts and chains int64 [n]. A row whose end lies before its
    count starts over. The backend is one of the CPU's.
    """
    if backend is Backend.NUMBA:
        _cpu().extend_chains(tokens, ends, counts, chains)
    else:
        reference.extend_chains(tokens, ends, counts, chains)


def follow_lists(backend: Backend, memory: DigestMemory, lists: TokenLists) -> None:
    """Add the tokens computed since each request's last step; results for the batch go to the memory.

    A request whose count is 0, or that fell behind its count, is digested from its first token.
    """
    if backend is Backend.TRITON:
        _kernel().follow_lists(memory, lists)
    else:
        reference.follow_lists(memory, lists)


def follow_inputs(backend: Backend, memory: DigestMemory, fed: FedTokens) -> None:
    """Results are the chains before this forward's inputs, which are then added to their rows.

    The marks of chains that start over are cleared. Of the last tokens fed, as many as a tail holds, those
    count that the next step's prefix_lens has room for; the engine must accept all before them.
    """
    if backend is Backend.TRITON:
        _kernel().follow_inputs(memory, fed)
    else:
        reference.follow_inputs(memory, fed)
