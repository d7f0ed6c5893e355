"""The record mathematics: 64-bit mixing of tokens, chains over prefixes, keys of KV words; modulo 2^64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from canary_kernels.layout import CHAIN_ANCHOR, signed, unsigned

TOKEN_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xD1B54A32D192ED03
MIX_OFFSET = 0x632BE59BD9B4E019
FINALIZE_FIRST = 0xBF58476D1CE4E5B9
FINALIZE_SECOND = 0x94D049BB133111EB

_FIRST, _SECOND = np.uint64(FINALIZE_FIRST), np.uint64(FINALIZE_SECOND)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def finalize_int(value: int) -> int:
    """The 64-bit finaliser of one unsigned value."""
    value = unsigned(value)
    value = unsigned((value ^ value >> 30) * FINALIZE_FIRST)
    value = unsigned((value ^ value >> 27) * FINALIZE_SECOND)
    return value ^ value >> 31


def mix64_int(token: int, position: int) -> int:
    """What one token at one position adds to a chain, unsigned."""
    return finalize_int(token * TOKEN_FACTOR + position * POSITION_FACTOR + MIX_OFFSET)


def word_key_int(word: int) -> int:
    """Odd key of a word index (counted over all heads of a layer), unsigned."""
    return finalize_int((word + 1) * TOKEN_FACTOR) | 1


def layer_key_int(layer: int) -> int:
    """Odd key of a global layer index, unsigned."""
    return finalize_int((layer + 1) * POSITION_FACTOR + MIX_OFFSET) | 1


def finalize_(values: Tensor) -> Tensor:
    """The 64-bit finaliser over a CPU int64 tensor, in place; returns it."""
    # NumPy has unsigned shifts, which PyTorch lacks on uint64: 8 passes in place of 11, each twice as fast.
    bits = values.numpy().view(np.uint64)
    shifted = bits >> _SHIFTS[0]
    np.bitwise_xor(bits, shifted, out=bits)
    np.multiply(bits, _FIRST, out=bits)
    np.right_shift(bits, _SHIFTS[1], out=shifted)
    np.bitwise_xor(bits, shifted, out=bits)
    np.multiply(bits, _SECOND, out=bits)
    np.right_shift(bits, _SHIFTS[2], out=shifted)
    np.bitwise_xor(bits, shifted, out=bits)
    return values


_TOKEN_FACTOR, _POSITION_FACTOR = signed(TOKEN_FACTOR), signed(POSITION_FACTOR)
_MIX_OFFSET = torch.tensor(signed(MIX_OFFSET))


def mix64(tokens: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: what each token at its position adds to a chain. CPU tensors, int32 or int64."""
    mixed = torch.add(_MIX_OFFSET, positions.long(), alpha=_POSITION_FACTOR)
    return finalize_(mixed.add_(tokens.long(), alpha=_TOKEN_FACTOR))


def chain_of(tokens: Tensor) -> Tensor:
    """int64 [n + 1]: chain[p] is the digest of tokens[:p], chain[0] the anchor. CPU tensor of integers."""
    chain = torch.empty(tokens.shape[0] + 1, dtype=torch.int64)
    chain[0] = signed(CHAIN_ANCHOR)
    chain[1:] = mix64(tokens, torch.arange(tokens.shape[0]))
    return chain.cumsum_(0)


def word_keys(start: int, count: int) -> Tensor:
    """int64 [count], on the CPU: keys of the words start, start + 1, ..."""
    words = torch.arange(start + 1, start + count + 1)
    return finalize_(words * _TOKEN_FACTOR).bitwise_or_(1)


def layer_keys(start: int, count: int) -> Tensor:
    """int64 [count], on the CPU: keys of the global layers start, start + 1, ..."""
    layers = torch.arange(start + 1, start + count + 1)
    return finalize_(layers * _POSITION_FACTOR + _MIX_OFFSET).bitwise_or_(1)
