"""Find the one word that changed, from a stored and a current fingerprint, and what it was before."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.hashing import layer_key_int, word_keys
from canary_kernels.layout import PLANE_WORDS, Part, Plane, unsigned

if TYPE_CHECKING:
    from canary_kernels.buffers import KVSource
    from canary_kernels.fingerprint.geometry import Geometry
    from canary_kernels.fingerprint.plan import FingerprintPlan

_WORD_BYTES = 4
_WORD_RANGE = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WordChange:
    """One 32-bit word that explains the difference of two fingerprints."""

    layer: int  # global
    head: int  # global
    part: Part
    plane: Plane
    word: int  # of the layer's plane, counted over all heads
    original: int  # the word as recorded, little-endian uint32
    current: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A word whose change by `delta` would explain a difference; its current value decides."""

    source: KVSource
    geometry: Geometry
    index: int  # of the words that the source covers
    delta: int  # current - original

    @property
    def word(self) -> int:
        """Index in the layer's plane, counted over all heads."""
        return self.geometry.first_word % PLANE_WORDS + self.index

    def explain(self, current: int) -> WordChange | None:
        """The change, if the word's value as it is now allows it."""
        original = current - self.delta
        if self.delta == 0 or not 0 <= original < _WORD_RANGE:
            return None
        return WordChange(
            layer=self.source.layer,
            head=self.word * _WORD_BYTES // self.source.head_bytes,
            part=self.source.part,
            plane=self.source.plane,
            word=self.word,
            original=original,
            current=current,
        )


def suspects(plan: FingerprintPlan, part: Part, stored: int, current: int) -> list[Suspect]:
    """Every word that could explain a difference of two fingerprints, nearly always one. Host only."""
    found = []
    difference = unsigned(current - stored)
    for bundle in plan.bundles:
        where = bundle.geometry
        # The plan's own keys lie on the device; reading them back would wait for it.
        inverse = _inverse_word_keys(where.first_word, where.num_words)
        held = [source for source in bundle.sources if source.part is part]
        factors = [difference * _inverse_layer_key(source.layer) % (1 << 64) for source in held]
        deltas = (np.array(factors, dtype=np.uint64)[:, None] * inverse).view(np.int64)
        small = (deltas > -_WORD_RANGE) & (deltas < _WORD_RANGE)
        found += [
            Suspect(source=held[row], geometry=where, index=index, delta=int(deltas[row, index]))
            for row, index in np.argwhere(small).tolist()
        ]
    return found


def locate(plan: FingerprintPlan, part: Part, slot: int, stored: int, current: int) -> WordChange | None:
    """The word whose change turns the stored fingerprint into the current one; None = no single word does.

    Reads the slot's bytes as they are now: call it before anything else writes the slot.
    """
    found = []
    for suspect in suspects(plan, part, stored, current):
        value = read_words(suspect.geometry, suspect.source, slot)[suspect.index]
        if (change := suspect.explain(value)) is not None:
            found.append(change)
    return found[0] if len(found) == 1 else None


def read_words(where: Geometry, source: KVSource, slot: int) -> list[int]:
    """The covered words of a slot that the source holds, as uint32, padded with zeros."""
    slot = source.sharding.local(slot)
    tensor = source.tensor
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    start = tensor.data_ptr() - storage.data_ptr()
    in_page = slot % where.page_size
    start += slot // where.page_size * where.page_stride + in_page // where.tile_size * where.tile_stride
    start += in_page % where.tile_size * where.slot_stride
    index = torch.arange(where.num_bytes)
    head, within = index // where.head_bytes, index % where.head_bytes
    band, within = within // where.band_bytes, within % where.band_bytes
    offset = within // where.element_bytes * where.element_stride + within % where.element_bytes
    offset += band * where.band_stride + head * where.head_stride
    slot_bytes = memory[(offset + start).to(tensor.device)].cpu().numpy()
    padded = np.zeros(where.num_words * _WORD_BYTES, dtype=np.uint8)
    padded[: where.num_bytes] = slot_bytes
    return [int(word) for word in padded.view("<u4")]


@functools.lru_cache(maxsize=64)
def _inverse_word_keys(first: int, count: int) -> np.ndarray:
    """Inverses of the word keys first, first + 1, ... modulo 2^64."""
    return _inverse(word_keys(first, count).numpy().view(np.uint64))


@functools.lru_cache(maxsize=1024)
def _inverse_layer_key(layer: int) -> int:
    return pow(layer_key_int(layer), -1, 1 << 64)


def _inverse(keys: np.ndarray) -> np.ndarray:
    """Inverses of odd uint64 keys modulo 2^64."""
    inverse = keys.copy()  # right in the lowest 3 bits; each Newton step doubles that
    for _ in range(5):
        inverse *= np.uint64(2) - keys * inverse
    return inverse
