"""Counts what is known of damaged bytes: flipped bits, and slots that arrived damaged from elsewhere."""

from __future__ import annotations

from collections import Counter

from canary_obs.bit_statistics import FEW_BITS, flipped_bits
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import Evidence, RankKey
from canary_obs.vocabulary import OTHER_PEERS, Reason

PEERS_KEPT = 32  # of a rank; engines that restart get new names


class DamageAccount:
    """Not thread-safe: its owner holds a lock. Counts evidence, of which an incident has at most sixteen."""

    def __init__(self) -> None:
        self.bits: Counter[tuple[RankKey, int, str]] = Counter()  # by rank, position and direction
        self.transferred: Counter[tuple[RankKey, str]] = Counter()  # by rank and peer
        self._peers: Counter[RankKey] = Counter()

    def add(self, evidence: Evidence) -> None:
        """Count the flipped bits of one slot whose bytes are damaged."""
        for word in evidence.changed:
            bits = flipped_bits(word)
            if len(bits) <= FEW_BITS:
                self.bits.update((evidence.identity.key, bit, direction) for bit, direction in bits)

    def add_arrival(self, event: ViolationEvent) -> None:
        """Count a violation if its bytes were damaged when they arrived from a peer.

        Damage that a later check finds happened here, wherever the bytes had come from.
        """
        row, rank = event.violation, event.identity.key
        if row.peer is None or row.reason is not Reason.KV_DATA:
            return
        key = rank, row.peer
        if key not in self.transferred:
            if self._peers[rank] >= PEERS_KEPT:
                key = rank, OTHER_PEERS
            else:
                self._peers[rank] += 1
        self.transferred[key] += row.slots
