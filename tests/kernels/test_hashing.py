"""DESIGN's test vectors, and tensors against plain integers."""

import pytest
import torch
from hypothesis import given, strategies as st

from canary_kernels import hashing
from canary_kernels.layout import unsigned
from tests.oracles import records as oracle

TOKENS = st.integers(-(1 << 31), (1 << 31) - 1)
POSITIONS = st.integers(0, (1 << 29) - 1)


def hexes(values):
    return [hex(unsigned(value)) for value in values]


@pytest.mark.parametrize("source", [hashing, oracle])
def test_design_vectors(source):
    is_oracle = source is oracle
    finalize = oracle.finalize if is_oracle else hashing.finalize_int
    mix64 = oracle.mix64 if is_oracle else hashing.mix64_int
    word_key = oracle.word_key if is_oracle else hashing.word_key_int
    layer_key = oracle.layer_key if is_oracle else hashing.layer_key_int
    assert finalize(1) == 0x5692161D100B05E5
    assert mix64(0, 0) == 0x6DB6CA64564DAEAA
    assert mix64(128000, 0) == 0x3C41993962E2DD5D
    assert mix64(42, 131071) == 0x378C2323E9889E86
    assert (word_key(0), word_key(511)) == (0xE220A8397B1DCDAF, 0x4980AF326A4B65D9)
    assert (layer_key(0), layer_key(63)) == (0x6CA8AE763E8E2D75, 0x595B77DFE4B018D7)


def test_chain_vector():
    chain = hashing.chain_of(torch.tensor([5, 6, 7])).tolist()
    assert hexes(chain[:3]) == ["0x243f6a8885a308d3", "0x6d8eb1aca6e03a0b", "0x177ef7e296dcde4d"]
    assert len(chain) == 4


def test_empty_chain_is_the_anchor():
    assert hexes(hashing.chain_of(torch.empty(0, dtype=torch.int32)).tolist()) == ["0x243f6a8885a308d3"]


def test_fingerprint_vectors_of_the_oracle():
    assert oracle.fingerprint({0: range(16), 1: range(16, 32)}) == 0xA30C023563C5D230
    assert oracle.fingerprint({0: range(1, 7)}) == 0xC08583F42D11E1D8


@given(st.lists(st.tuples(TOKENS, POSITIONS), min_size=1))
def test_mix64_equals_plain_integers(pairs):
    tokens, positions = (torch.tensor([pair[i] for pair in pairs]) for i in (0, 1))
    mixed = [unsigned(value) for value in hashing.mix64(tokens, positions).tolist()]
    assert mixed == [hashing.mix64_int(*pair) for pair in pairs] == [oracle.mix64(*pair) for pair in pairs]
    assert torch.equal(hashing.mix64(tokens.int(), positions.int()), hashing.mix64(tokens, positions))


@given(st.integers(0, 1 << 20), st.integers(0, 40))
def test_keys_equal_plain_integers(start, count):
    words, layers = hashing.word_keys(start, count), hashing.layer_keys(start, count)
    assert [unsigned(key) for key in words.tolist()] == [oracle.word_key(start + i) for i in range(count)]
    assert [unsigned(key) for key in layers.tolist()] == [oracle.layer_key(start + i) for i in range(count)]
    assert all(hashing.word_key_int(start + i) % 2 for i in range(count))
