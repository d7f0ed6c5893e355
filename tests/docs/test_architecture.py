"""docs/architecture.md says what the code does: test vectors, reasons, packages, links."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from canary_kernels import hashing, layout
from canary_kernels.layout import unsigned

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
VECTORS = re.findall(
    r"^\| `((?:finalize|mix64|word_key|layer_key)\([^`]*\))` \| `(0x[0-9a-f]+)` \|$", PAGE, re.M
)
CHAINS = re.findall(r"^\| `chain\(\[([^]]*)\]\)\[(\d+)\]` \| `(0x[0-9a-f]+)` \|$", PAGE, re.M)
FUNCTIONS = {
    "finalize": hashing.finalize_int,
    "mix64": hashing.mix64_int,
    "word_key": hashing.word_key_int,
    "layer_key": hashing.layer_key_int,
}


@pytest.mark.parametrize(("expression", "value"), VECTORS)
def test_vectors_of_the_keys(expression: str, value: str) -> None:
    name, arguments = expression.rstrip(")").split("(")
    assert FUNCTIONS[name](*map(int, arguments.split(","))) == int(value, 16)


@pytest.mark.parametrize(("tokens", "position", "value"), CHAINS)
def test_vectors_of_the_chain(tokens: str, position: str, value: str) -> None:
    chain = hashing.chain_of(torch.tensor([int(token) for token in tokens.split(",")]))
    assert unsigned(int(chain[int(position)])) == int(value, 16)


def test_vectors_of_the_fingerprint() -> None:
    def fingerprint(layers: list[bytes]) -> int:
        total = 0
        for layer, data in enumerate(layers):
            padded = data + bytes(-len(data) % 4)
            words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
            summed = sum(hashing.word_key_int(index) * word for index, word in enumerate(words))
            total += hashing.layer_key_int(layer) * summed
        return unsigned(total)

    rows = dict(re.findall(r"^\| `fingerprint` of (.*) \| `(0x[0-9a-f]+)` \|$", PAGE, re.M))
    expected = {
        "two layers, bytes 0..15 and 16..31": fingerprint([bytes(range(16)), bytes(range(16, 32))]),
        "one layer, bytes 01 02 03 04 05 06": fingerprint([bytes(range(1, 7))]),
    }
    assert {name: int(value, 16) for name, value in rows.items()} == expected


def test_there_are_vectors() -> None:
    assert (len(VECTORS), len(CHAINS)) == (8, 2)


def test_every_reason_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", PAGE.split("## 2.")[0], re.M)
    assert rows == [reason.name.lower() for reason in layout.Reason]


def test_sizes_of_device_memory() -> None:
    assert f"{layout.NUM_LANES} lanes (phase, reason)" in PAGE
    assert f"2 x {layout.COUNTER_WORDS} words of 8 B per group" in PAGE
    assert f"rows of {8 * layout.ROW_WORDS} B per group" in PAGE


def test_the_count_of_invisible_sets() -> None:
    """Sets of four top bits in two of 80 layers and two of 2048 words whose changes cancel."""
    layers = [hashing.layer_key_int(layer) for layer in range(80)]
    words = [hashing.word_key_int(word) for word in range(2048)]

    def twos(keys: list[int], sign: int) -> list[int]:
        """How many pairs of keys have each power of two in their sum or difference."""
        own = np.array([unsigned(key) for key in keys], dtype=np.uint64)
        values = (own[:, None] + own if sign > 0 else own[:, None] - own)[np.tril_indices(len(keys), -1)]
        lowest = values & -values
        counts = np.bincount(np.log2(lowest[lowest > 0]).astype(np.int64), minlength=65)
        counts[64] = np.count_nonzero(lowest == 0)
        return [int(count) for count in counts]

    invisible = pairs = 0
    for of_layers in (twos(layers, 1), twos(layers, -1)):
        for of_words in (twos(words, 1), twos(words, -1)):
            pairs += sum(of_layers) * sum(of_words)
            invisible += sum(of_layers[a] * of_words[b] for a in range(65) for b in range(65) if a + b >= 33)
    assert f"of the {pairs:.1e} sets".replace("e+10", "e10") in PAGE
    assert f"{invisible} are invisible" in PAGE


def test_paths_exist() -> None:
    for path in re.findall(r"`((?:canary_obs|canary_kernels|tests|docs|alerts|dashboards)/[\w/.-]+)`", PAGE):
        place = ROOT / ("kernels/" + path if path.startswith("canary_kernels") else path)
        assert place.exists(), path
    for link in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
