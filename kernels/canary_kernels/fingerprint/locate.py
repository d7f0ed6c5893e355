"""Find the one word that changed, from a stored and a current fingerprint, and what it was before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.hashing import layer_key_int
from canary_kernels.layout import Part, unsigned

if TYPE_CHECKING:
    from canary_kernels.buffers import KVSource
    from canary_kernels.fingerprint.plan import Bundle, FingerprintPlan

_WORD_BYTES = 4
_WORD_RANGE = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WordChange:
    """One 32-bit word that explains the difference of two fingerprints."""

    layer: int  # global
    head: int  # global
    part: Part
    word: int  # of the layer, counted over all heads
    original: int  # the word as recorded, little-endian uint32
    current: int


def locate(plan: FingerprintPlan, part: Part, slot: int, stored: int, current: int) -> WordChange | None:
    """The word whose change turns the stored fingerprint into the current one; None = no single word does.

    Reads the slot's bytes as they are now: call it before anything else writes the slot.
    """
    found = [
        change
        for bundle in plan.bundles
        for source in bundle.sources
        if source.part is part
        for change in _explain(bundle, source, slot, unsigned(current - stored))
    ]
    return found[0] if len(found) == 1 else None


def read_words(bundle: Bundle, source: KVSource, slot: int) -> list[int]:
    """The covered words of a slot in one source, as uint32, padded with zeros."""
    where, tensor = bundle.geometry, source.tensor
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    start = tensor.data_ptr() - storage.data_ptr()
    start += slot // where.page_size * where.page_stride + slot % where.page_size * where.slot_stride
    index = torch.arange(where.num_bytes)
    head, within = index // where.head_bytes, index % where.head_bytes
    offset = within // where.element_bytes * where.element_stride + within % where.element_bytes
    slot_bytes = memory[(offset + head * where.head_stride + start).to(tensor.device)].cpu().numpy()
    padded = np.zeros(where.num_words * _WORD_BYTES, dtype=np.uint8)
    padded[: where.num_bytes] = slot_bytes
    return [int(word) for word in padded.view("<u4")]


def _explain(bundle: Bundle, source: KVSource, slot: int, difference: int) -> list[WordChange]:
    keys = bundle.word_keys.cpu().numpy().view(np.uint64) * np.uint64(layer_key_int(source.layer))
    deltas = (np.uint64(difference) * _inverse(keys)).view(np.int64)
    changes = []
    for index in np.flatnonzero(abs(deltas) < _WORD_RANGE):
        current = read_words(bundle, source, slot)[index]
        original = current - int(deltas[index])
        if original != current and 0 <= original < _WORD_RANGE:
            word = bundle.geometry.first_word + int(index)
            changes.append(
                WordChange(
                    layer=source.layer,
                    head=word * _WORD_BYTES // source.head_bytes,
                    part=source.part,
                    word=word,
                    original=original,
                    current=current,
                )
            )
    return changes


def _inverse(keys: np.ndarray) -> np.ndarray:
    """Inverses of odd uint64 keys modulo 2^64."""
    inverse = keys.copy()  # right in the lowest 3 bits; each Newton step doubles that
    for _ in range(5):
        inverse *= np.uint64(2) - keys * inverse
    return inverse
