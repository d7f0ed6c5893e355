"""Buffers and batches as compiled kernels take them: int64 words in one block, tensors as addresses."""

from __future__ import annotations

import functools
from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers, RowBatch

# Words of a buffers frame.
RECORDS, COUNTERS, VIOLATIONS, CLOCK, NUM_SLOTS, LANE_ROWS = range(6)

# Words of a batch frame: sizes, then one address per column.
(
    TABLE_STRIDE, NUM_ROWS, WIDTH, PAGE_SIZE, NUM_REQUESTS, NUM_TOKENS, HAS_DIGESTS, HAS_EXPECTED, HAS_KNOWN,
    WIDE,
) = range(10)  # fmt: skip
(
    TABLE, ROWS, STARTS, PREFIX_LENS, EXTEND_LENS, TOKEN_STARTS, DIGESTS, INPUT_IDS, POSITIONS, OUT_SLOTS,
    EXPECTED_IDS, KNOWN_LENS, KNOWN_DIGESTS,
) = range(10, 23)  # fmt: skip
# Bit (column) of WIDE: the column's integers are int64, not int32.


class Frame(NamedTuple):
    """A block of words and what keeps the memory behind its addresses alive."""

    address: int
    words: array[int]
    tensors: tuple[Tensor, ...]
    lasting: bool = True  # False = some of the memory is a copy, as of now


def frame_of_buffers(buffers: GroupBuffers) -> int:
    """Address of a group's buffers frame; made once."""
    frame: Frame | None = buffers.cache.get(frame_of_buffers)
    if frame is None:
        held = buffers.records, buffers.counters, buffers.violations, buffers.clock
        sizes = buffers.num_slots, buffers.violations.shape[1]
        words = array("q", (*(tensor.data_ptr() for tensor in held), *sizes))
        frame = buffers.cache[frame_of_buffers] = Frame(words.buffer_info()[0], words, held)
    return frame.address


def frame_of_batch(batch: RowBatch) -> int:
    """Address of a batch's frame, valid until the next call; made once, unless columns must be copied."""
    frame: Frame | None = batch.cache.get(frame_of_batch)
    if frame is None or not frame.lasting:
        frame = batch.cache[frame_of_batch] = _frame_of_batch(batch)
    return frame.address


def _frame_of_batch(batch: RowBatch) -> Frame:
    table, rows, ids, digests, expected = (
        batch.slot_table, batch.rows, batch.input_ids, batch.digests, batch.expected_ids,
    )  # fmt: skip
    integers = (
        rows, batch.starts, batch.prefix_lens, batch.extend_lens, batch.token_starts,
        rows if digests is None else digests, ids, batch.positions, batch.out_slots,
        ids if expected is None else expected,
        rows if batch.known_lens is None else batch.known_lens,
        rows if batch.known_digests is None else batch.known_digests,
    )  # fmt: skip
    lasting = all(map(torch.Tensor.is_contiguous, integers))
    columns = (table, *(integers if lasting else [column.contiguous() for column in integers]))
    num_rows, width = table.shape
    words = array(
        "q",
        (
            table.stride(0), num_rows, width, batch.page_size, rows.numel(), ids.numel(),
            digests is not None, expected is not None, batch.known_lens is not None,
            _wide_bits(*[column.dtype for column in columns]),
            *[column.data_ptr() for column in columns],
        ),
    )  # fmt: skip
    return Frame(words.buffer_info()[0], words, columns, lasting)


@functools.cache
def _wide_bits(*types: torch.dtype) -> int:
    return sum((kind is torch.int64) << bit for bit, kind in enumerate(types, TABLE))
