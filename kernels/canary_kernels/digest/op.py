"""Entry points of digest: the chain over each request's prefix, advanced by what is new in each step."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from canary_kernels.checks import Backend
from canary_kernels.digest import reference
from canary_kernels.digest.steps import DigestMemory, GoOn, InputTokens, TokenLists

if TYPE_CHECKING:
    from types import ModuleType

Ints = NDArray[np.signedinteger[Any]]


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


def extend_runs(backend: Backend, tokens: Ints, starts: Ints, stops: Ints, chains: Ints) -> None:
    """Add to each chain its tokens from position starts[i] up to stops[i]; none if that is not more.

    tokens int32 [total]: those of all rows, end to end; starts, stops and chains int64 [n]. All are
    contiguous and can be written. One of the CPU's backends. Raises ValueError for more or fewer tokens.
    """
    extend = _cpu().extend_runs if backend is Backend.NUMBA else reference.extend_runs
    if (wanted := extend(tokens, starts, stops, chains)) != tokens.size:
        raise ValueError(f"{tokens.size} tokens for runs of {wanted}; give each run's tokens, end to end")


def one_by_one(backend: Backend, state: NDArray[np.int64], ahead: NDArray[np.int64]) -> GoOn:
    """What extends each of n chains by a token: called once per position with `computed` and those tokens.

    It returns False, and changes nothing, unless computed[i] is the tokens in chain i, and ahead[i] more, of
    all of them.

    state: int64 [2, n]; the tokens in each chain, and the chain, changed in place. ahead: int64 [n]. Both are
    contiguous. A call raises struct.error, and changes nothing, for what is no token, too few or too many.
    One of the CPU's backends.
    """
    make = _cpu().one_by_one if backend is Backend.NUMBA else reference.one_by_one
    extend: GoOn = make(state, ahead)
    return extend


def follow_lists(backend: Backend, memory: DigestMemory, lists: TokenLists) -> None:
    """Add the tokens computed since each request's last step; results for the batch go to the memory.

    A request whose count is 0, or that fell behind its count, is digested from its first token.
    """
    if backend is Backend.TRITON:
        _kernel().follow_lists(memory, lists)
    else:
        reference.follow_lists(memory, lists)


def follow_inputs(backend: Backend, memory: DigestMemory, fed: InputTokens) -> None:
    """Results are the chains before this forward's inputs, which are then added to their rows.

    The marks of chains that start over are cleared. Of the last tokens fed, as many as a tail holds, those
    count that the next step's prefix_lens has room for; the engine must accept all before them.
    """
    if backend is Backend.TRITON:
        _kernel().follow_inputs(memory, fed)
    else:
        reference.follow_inputs(memory, fed)
