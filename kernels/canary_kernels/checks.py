"""Argument checks of the operations. They read shapes, types and devices, never device memory."""

from __future__ import annotations

import operator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from canary_kernels.layout import RECORD_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch

_INTEGERS = frozenset({torch.int32, torch.int64})
_MIN_LANE_ROWS = 2


class Backend(Enum):
    """Which implementation runs: the reference or compiled Python on the CPU, Triton kernels on a GPU."""

    TORCH = "torch"
    NUMBA = "numba"
    TRITON = "triton"


class KernelArgumentError(ValueError):
    """An argument breaks an operation's contract. The message gives the value, the rule and the remedy."""


def launched_again(cache: dict[Any, Any], what: object, *given: object) -> bool:
    """Launch what `keep_launch` kept of this operation for these very objects; False = nothing was kept."""
    kept = cache.get(what)
    if kept is None or not all(map(operator.is_, kept[0], given)):
        return False
    kept[1]()
    return True


def keep_launch(cache: dict[Any, Any], what: object, launch: Callable[[], None], *given: object) -> None:
    """Keep a launch whose arguments are checked, for the next call with the same objects."""
    cache[what] = given, launch


def check_buffers(backend: Backend, buffers: GroupBuffers) -> None:
    """Raise KernelArgumentError unless these buffers suit this backend. Checked once."""
    if buffers.cache.get(check_buffers) is backend:
        return
    records = buffers.records
    if records.dim() != 2 or records.shape[1] != RECORD_WORDS or records.dtype is not torch.int64:
        raise KernelArgumentError(
            f"records have shape {tuple(records.shape)} and type {records.dtype}; the rule is int64 "
            f"[num_slots, {RECORD_WORDS}]; allocate them with allocate_buffers"
        )
    if buffers.violations.shape[1] < _MIN_LANE_ROWS:
        raise KernelArgumentError(
            f"the violation log has {buffers.violations.shape[1]} rows per lane; the rule is at least "
            f"{_MIN_LANE_ROWS} (the first and the latest); pass a larger lane_rows to allocate_buffers"
        )
    if backend is not Backend.TRITON and records.device.type != "cpu":
        raise KernelArgumentError(
            f"backend is {backend.value} and the records are on {records.device}; the rule is records on the "
            "CPU; use Backend.TRITON"
        )
    buffers.cache[check_buffers] = backend


def check_batch(buffers: GroupBuffers, batch: RowBatch) -> None:
    """Raise KernelArgumentError unless the batch is consistent in itself and lies where the buffers lie."""
    if batch.cache.get(check_batch) is buffers:
        return
    device = buffers.records.device
    table = batch.slot_table
    if table.dim() != 2 or table.stride(1) != 1:
        raise KernelArgumentError(
            f"slot_table has shape {tuple(table.shape)} and strides {table.stride()}; the rule is "
            "[num_rows, width] with a contiguous last axis; pass table.contiguous()"
        )
    if batch.page_size < 1:
        raise KernelArgumentError(
            f"page_size is {batch.page_size}; the rule is >= 1; pass the pool's page size"
        )
    requests, tokens = batch.rows.shape[0], batch.input_ids.shape[0]
    if not _is_sound(batch, device.index, requests, tokens):
        _check_columns(batch, device, requests, tokens)
    batch.cache[check_batch] = buffers


def _is_sound(batch: RowBatch, index: int | None, requests: int, tokens: int) -> bool:
    """The rules of `_check_columns`, in a third of the time; False = let that decide. index: None = CPU."""
    rows = (
        batch.rows, batch.starts, batch.prefix_lens, batch.extend_lens, batch.digests, batch.known_lens,
        batch.known_digests,
    )  # fmt: skip
    new = batch.input_ids, batch.positions, batch.out_slots, batch.expected_ids
    return (
        _are_sound((batch.slot_table,), batch.slot_table.numel(), index)
        and _are_sound(rows, requests, index)
        and _are_sound((batch.token_starts,), requests + 1, index)
        and _are_sound(new, tokens, index)
        and (batch.known_lens is None) == (batch.known_digests is None)
    )


def _are_sound(columns: tuple[Tensor | None, ...], size: int, index: int | None) -> bool:
    for column in columns:
        if column is not None and (
            column.dtype not in _INTEGERS
            or column.numel() != size
            or not (column.is_cpu if index is None else column.get_device() == index)
        ):
            return False
    return True


def _check_columns(batch: RowBatch, device: torch.device, requests: int, tokens: int) -> None:
    table = batch.slot_table
    _check_column("slot_table", table, table.shape[0], device)
    _check_column("rows", batch.rows, requests, device)
    _check_column("starts", batch.starts, requests, device)
    _check_column("prefix_lens", batch.prefix_lens, requests, device)
    _check_column("extend_lens", batch.extend_lens, requests, device)
    _check_column("token_starts", batch.token_starts, requests + 1, device)
    _check_column("input_ids", batch.input_ids, tokens, device)
    _check_column("positions", batch.positions, tokens, device)
    _check_column("out_slots", batch.out_slots, tokens, device)
    if batch.digests is not None:
        _check_column("digests", batch.digests, requests, device)
    if batch.expected_ids is not None:
        _check_column("expected_ids", batch.expected_ids, tokens, device)
    if (batch.known_lens is None) != (batch.known_digests is None):
        missing = "known_lens" if batch.known_lens is None else "known_digests"
        raise KernelArgumentError(f"{missing} is None; the rule is known_lens and known_digests, or neither")
    if batch.known_lens is not None and batch.known_digests is not None:
        _check_column("known_lens", batch.known_lens, requests, device)
        _check_column("known_digests", batch.known_digests, requests, device)


def check_slots(buffers: GroupBuffers, **columns: Tensor) -> None:
    """Raise KernelArgumentError unless columns are integer vectors of one length on the records' device."""
    length = next(iter(columns.values())).shape[0]
    device = buffers.records.device
    if not _are_sound(tuple(columns.values()), length, device.index):
        for name, column in columns.items():
            _check_column(name, column, length, device)


def _check_column(name: str, column: Tensor, length: int, device: torch.device) -> None:
    if column.dtype in _INTEGERS and column.shape[0] == length and column.device == device:
        return
    raise KernelArgumentError(
        f"{name} is {column.dtype} {list(column.shape)} on {column.device}; the rule is int32 or int64, "
        f"length {length}, on {device}; build all columns of one forward together"
    )
