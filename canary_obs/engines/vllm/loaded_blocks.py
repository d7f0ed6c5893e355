"""Loads as the canary takes them: what each block is to hold, which of its slots have arrived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.hashing import chain_of
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.pool_events import Loaded
from canary_obs.engines.vllm.sent_copies import KnownCopies

_Column = NDArray[np.int64]


class BlockRows(NamedTuple):
    """The blocks of some loads of one group, one row each."""

    blocks: _Column
    numbers: _Column  # in the request
    first: _Column  # offset of the first slot that was asked for
    stop: _Column  # and behind the last one

    def slots(self, block_slots: int) -> Tensor:
        """int64 [blocks, block_slots]: all slots of each block."""
        return torch.from_numpy(self.blocks[:, None] * block_slots + np.arange(block_slots))

    def among(self, blocks: Collection[int]) -> NDArray[np.bool_]:
        """Which of them are these."""
        if not blocks:
            return np.zeros(self.blocks.size, dtype=np.bool_)
        return np.isin(self.blocks, np.fromiter(blocks, np.int64))


def rows_of(loads: Iterable[Loaded], group: VllmGroup) -> BlockRows:
    """Without the null blocks of windows, and of states that are not kept."""
    found = [_rows(load, group) for load in loads]
    return found[0] if len(found) == 1 else BlockRows(*map(np.concatenate, zip(*found, strict=True)))


def _rows(load: Loaded, group: VllmGroup) -> BlockRows:
    blocks = np.array(load.blocks, dtype=np.int64)
    numbers = np.arange(load.number, load.number + blocks.size)
    if 0 in load.blocks:
        blocks, numbers = blocks[held := blocks != 0], numbers[held]
    if group.states:  # is there whole, or not at all
        return BlockRows(blocks, numbers, np.zeros_like(blocks), np.ones_like(blocks))
    size = group.block_size
    starts = numbers * size
    return BlockRows(
        blocks, numbers, np.maximum(load.start - starts, 0), np.minimum(load.stop - starts, size)
    )


def first_token(load: Loaded, size: int) -> int:
    """The first token that is loaded."""
    held = next(place for place, block in enumerate(load.blocks) if block)
    return max(load.start, (load.number + held) * size)


def loaded_blocks(
    rows: BlockRows, group: VllmGroup, tokens: bytes | None, expected: ArrivedBlocks | None = None,
    copied: Sequence[torch.Event] = (),
) -> LoadedBlocks:  # fmt: skip
    """Blocks of one group; tokens: int32 of the request, from its first on, as far as it is loaded.

    `expected` and `copied`: as in LoadedBlocks.
    """
    size, slots = group.block_slots, rows.slots(group.block_slots)
    if tokens is None or group.states:
        return LoadedBlocks(slots=slots, tokens=None, positions=None, chains=None, expected=expected)
    # What lies behind the last known token is not announced as arrived.
    end = (int(rows.numbers.max()) + 1) * size
    given = np.frombuffer(tokens, dtype=np.int32)[:end]
    ids, chains = np.zeros(end, dtype=np.int64), np.zeros(end, dtype=np.int64)
    ids[: given.size] = given
    found = chain_of(torch.from_numpy(ids[: given.size])).numpy()[:end]
    chains[: found.size] = found
    return LoadedBlocks(
        slots=slots,
        tokens=torch.from_numpy(ids.reshape(-1, size)[rows.numbers]),
        positions=torch.from_numpy(rows.numbers[:, None] * size + np.arange(size)),
        chains=torch.from_numpy(chains.reshape(-1, size)[rows.numbers]),
        expected=expected,
        copied=copied,
    )


def arrived_blocks(
    rows: BlockRows,
    group: VllmGroup,
    computed: int | None,
    failed: NDArray[np.bool_],
    sent: KnownCopies,
) -> ArrivedBlocks:
    """Which slots of these blocks have arrived, of the tokens below `computed` (None = all).

    A block is compared with copies only if nothing else was, or will be, written below their end.
    """
    size = group.block_slots
    end = rows.stop
    if computed is not None:
        before = (computed - rows.numbers * group.block_size) // group.slot_tokens
        end = np.minimum(end, before)
    end = np.where(failed, rows.first, end)
    written = sent.filled > (size if computed is None else end)
    unknown = (rows.first > 0) | written | (end <= rows.first)
    counts = np.where(unknown, 0, sent.counts)
    return ArrivedBlocks(
        first=torch.from_numpy(rows.first),
        stop=torch.from_numpy(np.maximum(rows.first, end)),
        filled=torch.from_numpy(np.where(unknown, 0, sent.filled)),
        copies=torch.from_numpy(counts),
        sent=_given(sent.folds, int(counts.max(initial=0))),
        peer=sent.peer,
    )


def _given(folds: NDArray[np.int64], width: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(folds[:, :width]))
