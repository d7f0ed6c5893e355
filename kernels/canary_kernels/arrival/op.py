"""Entry point of arrival: compare blocks that were loaded with what was sent, or at least with before."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import torch

from canary_kernels.arrival import reference
from canary_kernels.arrival.columns import ARRIVAL_WORDS, EDGE_WORDS
from canary_kernels.checks import Backend, KernelArgumentError, check_buffers
from canary_kernels.layout import RECORD_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

    from canary_kernels.arrival.load import ArrivedLoad
    from canary_kernels.buffers import GroupBuffers


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.arrival.kernel")


@functools.cache
def _launches() -> ModuleType:
    return importlib.import_module("canary_kernels.arrival.launches")


def weigh_arrivals(backend: Backend, buffers: GroupBuffers, load: ArrivedLoad) -> Tensor:
    """int64 [blocks, ARRIVAL_WORDS]: what `judge_arrivals` takes of these blocks.

    Where nothing is known of a slot, bytes that are all zero are those of a pool that was never written.
    """
    check_buffers(backend, buffers)
    _check_load(load)
    room = reference if backend is not Backend.TRITON else _kernel()
    blocks: Tensor = room.weigh_arrivals(buffers, load)
    return blocks


def keep_arrivals(backend: Backend, buffers: GroupBuffers, load: ArrivedLoad, matched: Tensor) -> None:
    """Store the records of the slots that have arrived, and set the other ones in `load.slots` to -1.

    matched: int64 [blocks]; the slots of a block where it is 0 get a baseline instead of a COMPLETE record.
    """
    check_buffers(backend, buffers)
    _check_load(load)
    room = reference if backend is not Backend.TRITON else _kernel()
    room.keep_arrivals(buffers, load, matched)


def fold_records(
    backend: Backend, buffers: GroupBuffers, slots: Tensor, keys: Tensor, *, baselines: bool = False
) -> Tensor:
    """int64 [blocks, 3] of slots (int64 [blocks, size]; -1 = left out): 1 = all COMPLETE; folds of K, V.

    The fold of a block is the sum of its slots' fingerprints, as their records have them, each times its key
    (int64 [size]). With `baselines`, a BASELINE will do as well.
    """
    check_buffers(backend, buffers)
    if slots.dtype is not torch.int64 or keys.dtype is not torch.int64 or slots.shape[1:] != keys.shape:
        raise KernelArgumentError(
            f"slots are {slots.dtype} {list(slots.shape)} with {list(keys.shape)} keys; the rule is int64, "
            "and a key for each slot of a block"
        )
    room = reference if backend is not Backend.TRITON else _kernel()
    folds: Tensor = room.fold_records(buffers, slots.contiguous(), keys, baselines=baselines)
    return folds


def put_together(
    backend: Backend, buffers: GroupBuffers, blocks: Tensor, sent: Tensor, load: ArrivedLoad | None
) -> tuple[Tensor | None, Sequence[Callable[[], None]]]:
    """The launches of `judge_arrivals` and, with a load, of `keep_arrivals`, and what they write: `matched`.

    The load was weighed. No launches: there is nothing that would take less time than the two calls.
    """
    # Of a copy that is contiguous nobody would hold the memory.
    if backend is not Backend.TRITON or not blocks.shape[0] or not sent.is_contiguous():
        return None, ()
    found: tuple[Tensor | None, Sequence[Callable[[], None]]]
    found = _launches().put_together(buffers, blocks, sent, load)
    return found


def _check_load(load: ArrivedLoad) -> None:
    count, size = load.slots.shape
    shapes = {
        "slots": (count, size),
        "old": (count, size, RECORD_WORDS),
        "identities": (count, size, 2),
        "now": (count, size, 2),
        "edges": (count, EDGE_WORDS),
        "keys": (size,),
        "held": (2,),
    }
    for name, shape in shapes.items():
        given = getattr(load, name)
        if given.shape != shape or given.dtype is not torch.int64 or not given.is_contiguous():
            raise KernelArgumentError(
                f"{name} is {given.dtype} {list(given.shape)}; the rule is int64 {list(shape)}, contiguous; "
                "give the columns of ArrivedLoad"
            )


def judge_arrivals(backend: Backend, buffers: GroupBuffers, blocks: Tensor, sent: Tensor) -> Tensor:
    """int64 [n]: 1 where a block equals one of the copies that may have been sent, K and V alike; else 0.

    blocks: int64 [n, ARRIVAL_WORDS], columns as in `Arrival`; sent: int64 [n, copies, 2], of K and V. Logs
    at HEAD, by part, of blocks that equal no copy: LOST_LOAD where the bytes are those from before, else
    KV_DATA. Where no copy is known: LOST_LOAD for bytes that are REPLACED and nevertheless the same.
    """
    check_buffers(backend, buffers)
    count = blocks.shape[0]
    if blocks.dtype is not torch.int64 or blocks.shape != (count, ARRIVAL_WORDS):
        raise KernelArgumentError(
            f"blocks are {blocks.dtype} {list(blocks.shape)}; the rule is int64 [n, {ARRIVAL_WORDS}]; "
            "give one row per block, with the columns of Arrival"
        )
    if sent.dtype is not torch.int64 or sent.dim() != 3 or (sent.shape[0], sent.shape[2]) != (count, 2):
        raise KernelArgumentError(
            f"sent is {sent.dtype} {list(sent.shape)}; the rule is int64 [{count}, copies, 2]; "
            "give the folded fingerprints of K and V of each copy"
        )
    room = reference if backend is not Backend.TRITON else _kernel()
    matched: Tensor = room.judge_arrivals(buffers, blocks.contiguous(), sent.contiguous())
    return matched
