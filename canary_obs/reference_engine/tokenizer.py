"""Bytes are tokens: 256 byte values, then begin and end of sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BOS = 256
EOS = 257
VOCAB_SIZE = 258


def encode(text: str, *, bos: bool = False) -> NDArray[np.int32]:
    """Token ids int32 [n] of a text's UTF-8 bytes."""
    raw = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    return np.concatenate([np.array([BOS], dtype=np.int32), raw]) if bos else raw


def decode(tokens: NDArray[np.int32]) -> str:
    """The text of token ids; special tokens are dropped, broken UTF-8 is replaced."""
    return bytes(int(token) for token in tokens if token < BOS).decode(errors="replace")
