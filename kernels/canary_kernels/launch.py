"""Launches without Triton's argument binder (50 us each): compiled on first use, started directly after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

if TYPE_CHECKING:
    from canary_kernels.buffers import GroupBuffers, RowBatch

_WIDE = 31  # Triton passes integers of more bits as int64


_KINDS: dict[tuple[object, ...], int] = {}


class Columns(NamedTuple):
    """What kernels take of a RowBatch: the table, its sizes, then the columns."""

    tensors: tuple[Any, ...]
    addresses: tuple[int, ...]  # the same, tensors as their data_ptr()
    kind: int  # equal kinds run the same machine code


NUM_ROW_COLUMNS = 13  # of Columns.tensors; those after it are per token


def columns_of(batch: RowBatch) -> Columns:
    """The batch as kernel arguments; worked out once."""
    columns: Columns | None = batch.cache.get(columns_of)
    if columns is None:
        columns = batch.cache[columns_of] = _columns_of(batch)
    return columns


def _columns_of(batch: RowBatch) -> Columns:
    table, rows, ids, slots = batch.slot_table, batch.rows, batch.input_ids, batch.out_slots
    starts, prefix, extend = batch.starts, batch.prefix_lens, batch.extend_lens
    first, positions = batch.token_starts, batch.positions
    digests = rows if batch.digests is None else batch.digests
    expected = ids if batch.expected_ids is None else batch.expected_ids
    known = rows if batch.known_lens is None else batch.known_lens
    known_digests = rows if batch.known_digests is None else batch.known_digests
    num_rows, width = table.shape
    stride, capacity, requests = table.stride(0), width * batch.page_size, rows.size(0)
    kind = (
        table.dtype, rows.dtype, starts.dtype, prefix.dtype, extend.dtype, first.dtype, digests.dtype,
        ids.dtype, positions.dtype, slots.dtype, expected.dtype, stride >> _WIDE, capacity >> _WIDE,
        batch.page_size, batch.digests is None, batch.expected_ids is None, batch.known_lens is None,
        known.dtype, known_digests.dtype,
    )  # fmt: skip
    return Columns(
        (
            table, stride, num_rows, capacity, rows, starts, prefix, extend, first, digests, known,
            known_digests, requests, ids, positions, slots, expected, ids.size(0),
        ),
        (
            table.data_ptr(), stride, num_rows, capacity, rows.data_ptr(), starts.data_ptr(),
            prefix.data_ptr(), extend.data_ptr(), first.data_ptr(), digests.data_ptr(), known.data_ptr(),
            known_digests.data_ptr(), requests, ids.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            expected.data_ptr(), ids.size(0),
        ),
        _KINDS.setdefault(kind, len(_KINDS)),
    )  # fmt: skip


class Start:
    """A compiled kernel with the arguments that stay: those of the buffers, and its constants."""

    __slots__ = ("_compiled", "_device", "_fixed", "_head", "_run", "_stream", "_tail")

    def __init__(
        self,
        compiled: Any,
        device: torch.device,
        head: tuple[int, ...],
        tail: tuple[Any, ...],
        fixed: int | None = None,
    ):
        self._compiled = compiled.function, compiled.packed_metadata, None, None, None  # no profiler hooks
        self._run: Callable[..., None] = compiled.run
        self._stream: Callable[[int | None], int] = triton.runtime.driver.active.get_current_stream
        self._device, self._head, self._tail = device.index, head, tail
        self._fixed = fixed  # the stream's handle, where it is always the same one

    def __call__(self, grid: tuple[int, int], changing: tuple[int, ...]) -> None:
        """Launch on the stream it was prepared for; addresses for tensors."""
        stream = self._stream(self._device) if self._fixed is None else self._fixed
        self._run(*grid, 1, stream, *self._compiled, *self._head, *changing, *self._tail)

    def again(self, grid: tuple[int, int], changing: tuple[int, ...]) -> Callable[[], None]:
        """What launches it with these arguments, on the stream that is current then: put together once."""
        run, current, device, fixed = self._run, self._stream, self._device, self._fixed
        first, rest = (*grid, 1), (*self._compiled, *self._head, *changing, *self._tail)

        def launch() -> None:
            run(*first, current(device) if fixed is None else fixed, *rest)

        return launch


def prepare(
    kernel: Any,
    buffers: GroupBuffers,
    grid: tuple[int, int],
    changing: tuple[Any, ...],
    constants: dict[str, Any],
    stream: torch.Stream | None = None,
) -> Start | None:
    """Launch as Triton does, compiling if need be. None = nothing compiled (the interpreter).

    stream: where this launch and all of its Start's go; None = whichever stream is current at each.
    The kernel's parameters: records ... lane_rows, then the changing ones; the constants may also be tensors.
    """
    head = buffers.records, buffers.counters, buffers.violations, buffers.clock
    sizes = buffers.num_slots, buffers.violations.shape[1]
    device, fixed = buffers.records.device, None
    with nullcontext() if stream is None else stream:
        compiled = kernel[grid](*head, *sizes, *changing, **constants)
        if not hasattr(compiled, "packed_metadata"):
            return None
        if stream is not None:
            # Entering a stream for each launch takes longer than the launch.
            fixed = triton.runtime.driver.active.get_current_stream(device.index)
    tail = tuple(_address(constants[name]) for name in kernel.arg_names if name in constants)
    addresses = tuple(tensor.data_ptr() for tensor in head)
    return Start(compiled, device, (*addresses, *sizes), tail, fixed)


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
