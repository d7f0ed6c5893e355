"""Counts what evidence says of damaged bytes: flipped bits, and blocks that came from elsewhere."""

from __future__ import annotations

from collections import Counter

from canary_obs.bit_statistics import FEW_BITS, flipped_bits
from canary_obs.records import Evidence, RankKey
from canary_obs.vocabulary import SlotEventKind

UNKNOWN_PEER = "unknown"


class DamageAccount:
    """Not thread-safe: its owner holds a lock. Counts evidence, of which an incident has at most sixteen."""

    def __init__(self) -> None:
        self.bits: Counter[tuple[RankKey, int, str]] = Counter()  # by rank, position and direction
        self.transferred: Counter[tuple[RankKey, str]] = Counter()  # by rank and peer

    def add(self, evidence: Evidence) -> None:
        """Count the evidence of one slot whose bytes are damaged."""
        if evidence.slot.intact is not False and not evidence.changed:
            return
        key = evidence.identity.key
        for word in evidence.changed:
            bits = flipped_bits(word)
            if len(bits) <= FEW_BITS:
                self.bits.update((key, bit, direction) for bit, direction in bits)
        # What the slot held when it was damaged is what came last.
        if evidence.history and evidence.history[-1].kind is SlotEventKind.RECEIVED:
            self.transferred[key, UNKNOWN_PEER] += 1
