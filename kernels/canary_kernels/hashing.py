"""The record mathematics: 64-bit mixing of tokens, chains over prefixes, keys of KV words; modulo 2^64."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.layout import CHAIN_ANCHOR, CHECK_BITS, FOLD_SHIFTS, unsigned

TOKEN_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xD1B54A32D192ED03
MIX_OFFSET = 0x632BE59BD9B4E019
FINALIZE_FIRST = 0xBF58476D1CE4E5B9
FINALIZE_SECOND = 0x94D049BB133111EB

_FIRST, _SECOND = np.uint64(FINALIZE_FIRST), np.uint64(FINALIZE_SECOND)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_TOKEN_FACTOR, _POSITION_FACTOR = np.uint64(TOKEN_FACTOR), np.uint64(POSITION_FACTOR)
_MIX_OFFSET = np.uint64(MIX_OFFSET)

# On the CPU the mathematics runs in NumPy, on the tensors' own memory: PyTorch has no shifts of unsigned
# 64-bit integers, and on a step's few thousand slots its operations take 2 to 5 times as long.
Integers: TypeAlias = NDArray[np.integer[Any]]
Words: TypeAlias = NDArray[np.uint64]


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


def _finalize(bits: Words) -> Words:
    """The 64-bit finaliser, in place; returns its argument."""
    shifted = bits >> _SHIFTS[0]
    np.bitwise_xor(bits, shifted, out=bits)
    np.multiply(bits, _FIRST, out=bits)
    np.right_shift(bits, _SHIFTS[1], out=shifted)
    np.bitwise_xor(bits, shifted, out=bits)
    np.multiply(bits, _SECOND, out=bits)
    np.right_shift(bits, _SHIFTS[2], out=shifted)
    np.bitwise_xor(bits, shifted, out=bits)
    return bits


def mix_arrays(tokens: Integers, positions: Integers) -> Words:
    """uint64 [n]: what each token at its position adds to a chain."""
    return mix_terms(tokens, position_terms(positions))


def position_terms(positions: Integers) -> Words:
    """uint64 [n]: what `mix_terms` takes for these positions."""
    terms = positions.astype(np.uint64)
    terms *= _POSITION_FACTOR
    terms += _MIX_OFFSET
    return terms


def mix_terms(tokens: Integers, terms: Words) -> Words:
    """`mix_arrays` for positions whose terms are known."""
    mixed = tokens.astype(np.uint64)  # negative tokens wrap, as they do in int64
    mixed *= _TOKEN_FACTOR
    mixed += terms
    return _finalize(mixed)


class MixesOfNext:
    """What the next token of each of n sequences adds to its chain, position after position."""

    def __init__(self, positions: Integers) -> None:
        """`positions`: of the tokens that the first call of `mix` is of, [n]."""
        self._terms = positions.astype(np.uint64) * _POSITION_FACTOR + _MIX_OFFSET

    def mix(self, tokens: NDArray[np.int64]) -> Words:
        """uint64 [n], as `mix_arrays` of these tokens; the next call is of the positions after them."""
        mixed = tokens.view(np.uint64) * _TOKEN_FACTOR
        np.add(mixed, self._terms, out=mixed)
        np.add(self._terms, _POSITION_FACTOR, out=self._terms)
        return _finalize(mixed)


def flaws_of(identities: Integers, chains: Integers) -> NDArray[np.int64]:
    """int64 [n]: 0 where a record's check of itself holds; identities and chains are its words, int64 [n]."""
    bits = np.bitwise_xor(identities, chains).view(np.uint64)
    for shift in FOLD_SHIFTS:
        bits ^= bits >> np.uint64(shift)
    bits &= np.uint64((1 << CHECK_BITS) - 1)
    return bits.view(np.int64)


def sealed_arrays(identities: NDArray[np.int64], chains: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: identities, which have no check yet, with their checks (see layout.sealed)."""
    folded = flaws_of(identities, chains)
    sealed: NDArray[np.int64] = identities | folded << 60 | folded >> 4 << 59
    return sealed


def mix64(tokens: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: what each token at its position adds to a chain. CPU tensors, int32 or int64."""
    return _tensor(mix_arrays(tokens.numpy(), positions.numpy()))


def chain_of(tokens: Tensor) -> Tensor:
    """int64 [n + 1]: chain[p] is the digest of tokens[:p], chain[0] the anchor. CPU tensor of integers."""
    chain = np.empty(tokens.shape[0] + 1, dtype=np.uint64)
    chain[0] = CHAIN_ANCHOR
    chain[1:] = mix_arrays(tokens.numpy(), np.arange(tokens.shape[0]))
    return _tensor(chain.cumsum())


def word_keys(start: int, count: int) -> Tensor:
    """int64 [count], on the CPU: keys of the words start, start + 1, ..."""
    words = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return _tensor(_finalize(words * _TOKEN_FACTOR) | np.uint64(1))


def layer_keys(start: int, count: int) -> Tensor:
    """int64 [count], on the CPU: keys of the global layers start, start + 1, ..."""
    layers = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return _tensor(_finalize(layers * _POSITION_FACTOR + _MIX_OFFSET) | np.uint64(1))


def _tensor(bits: Words) -> Tensor:
    return torch.from_numpy(bits.view(np.int64))
