"""How a bundle's rows are laid over the lanes of a GPU: constants of the fingerprint kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from canary_kernels.buffers import SHARED_SLOTS

if TYPE_CHECKING:
    from canary_kernels.fingerprint.plan import Bundle, FingerprintPlan

_MAX_BLOCK = 1024
_MIN_BLOCK = 64
# Rows that fill their block: one vector a lane and few registers, so that enough programs fit a
# multiprocessor to keep memory busy (H200: 0.984 of the ceiling; with 48 registers they spill: 0.936).
_FULL_WORDS, _FULL_REGISTERS = 128, 56  # words per warp, registers per lane
# Other rows leave lanes idle: fewer warps, two vectors a lane (latent rows: 0.91, not 0.85).
_RAGGED_WORDS, _RAGGED_REGISTERS = 256, 80  # H200: 0.884, not 0.867
_MAX_WARPS = 4
_VECTOR_BYTES = 16
# Few slots leave most multiprocessors idle, and a program alone with one waits for row after row: others
# share it then. H200, one slot and 64 of them, L2 flushed, in us: 32 layers of K and V 15.5 and 15.7 alone,
# 6.0 and 8.5 shared; 80 layers 34 and 34, 6.4 and 7.7. With 8 rows sharing takes longer.
_SHARING_PROGRAMS, _MAX_SHARES, _LEAST_ROWS, _FEWEST_ROWS = 1024, 16, 4, 16
# Rows of more bytes, as of states, are read block by block by the programs that share a slot; of shorter ones
# each has some rows. More programs would wait for each other's sums.
LONG_BYTES = 1 << 14
_LONG_BLOCK, _MAX_LONG_SHARES = 512, 256  # words of a block, which fill it; programs of a slot


def shape_of(bundle: Bundle | None) -> dict[str, Any]:
    """GEOMETRY, PAGES, ALIGNMENT, BLOCK and the compiler's options; None = nothing is covered."""
    if bundle is None:
        return {
            "GEOMETRY": (0,) * 7, "PAGES": (1, 0, 0, 1, 0, 1, 0, 1), "ALIGNMENT": 4, "BLOCK": _MIN_BLOCK,
            "num_warps": 1,
        }  # fmt: skip
    where = bundle.geometry
    long = where.num_bytes > LONG_BYTES
    block = min(_LONG_BLOCK if long else _MAX_BLOCK, max(_MIN_BLOCK, 1 << (where.num_words - 1).bit_length()))
    full = where.num_words % block == 0 and (long or where.num_words == block)
    full = full and bundle.alignment == _VECTOR_BYTES
    registers = _FULL_REGISTERS if full else _RAGGED_REGISTERS
    options = {} if torch.version.hip else {"maxnreg": registers}
    words = _FULL_WORDS if full else _RAGGED_WORDS
    return options | {
        "GEOMETRY": (
            where.head_bytes, where.head_stride, where.element_bytes, where.element_stride, where.num_bytes,
            where.band_bytes, where.band_stride,
        ),
        "PAGES": (
            where.page_size, where.page_stride, where.slot_stride, where.tile_size, where.tile_stride,
            where.sharding.ranks, where.sharding.rank, where.sharding.interleave,
        ),
        "ALIGNMENT": bundle.alignment, "BLOCK": block,
        "num_warps": max(1, min(_MAX_WARPS, block // words)),
    }  # fmt: skip


def split_of(plan: FingerprintPlan, slots: int) -> int:
    """How many programs read each of so many slots."""
    if not 0 < slots <= SHARED_SLOTS:
        return 1
    if has_long_rows(plan):
        blocks = plan.longest_row // (4 * _LONG_BLOCK)
        return min(_MAX_LONG_SHARES, _SHARING_PROGRAMS // slots, blocks)
    rows = max((len(bundle.sources) for bundle in plan.bundles), default=1)
    if rows < _FEWEST_ROWS:
        return 1
    return min(_MAX_SHARES, _SHARING_PROGRAMS // slots, rows // _LEAST_ROWS)


def has_long_rows(plan: FingerprintPlan) -> bool:
    """Whether one program takes so long for a slot that launches for few slots share them."""
    return plan.longest_row > LONG_BYTES
