"""What changed words have in common: bits, directions, places. Failing memory leaves patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import msgspec

from canary_obs.plurals import counted
from canary_obs.slot_facts import ChangedWord

WORD_BITS = 32
FEW_BITS = 2  # more changed bits in one word are another value, not a flip
RECURRENCES = 3
TO_ONE, TO_ZERO = "0_to_1", "1_to_0"


class WordAt(NamedTuple):
    """A changed word and where it was. `place`: of the rank and its group."""

    place: str
    slot: int
    word: ChangedWord


class BitStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over changed words whose original and current value are known. None = no pattern."""

    words: int
    flips: int  # words of which at most FEW_BITS bits changed
    bits: dict[str, int]  # flipped bits by `position direction`, position 0 = the least significant
    stuck_bit: str | None  # the position and direction of all flips, if they are RECURRENCES or more
    recurring_slots: dict[str, int]  # slots with several words
    recurring_layers: dict[str, int]  # layers with RECURRENCES words or more
    stride: int | None  # constant distance of damaged slots, as memory rows have
    suggests: tuple[str, ...]


def flipped_bits(word: ChangedWord) -> tuple[tuple[int, str], ...]:
    """Position and direction of each changed bit; () = unknown, or nothing changed."""
    if word.original is None or word.current is None:
        return ()
    before, after = int(word.original, 16), int(word.current, 16)
    changed = before ^ after
    return tuple(
        (bit, TO_ONE if after >> bit & 1 else TO_ZERO) for bit in range(WORD_BITS) if changed >> bit & 1
    )


def bit_statistics(found: Iterable[WordAt]) -> BitStatistics:
    """What the words have in common, and what that suggests."""
    words = [(found_at, own) for found_at in found if (own := flipped_bits(found_at.word))]
    flips = [(found_at, own) for found_at, own in words if len(own) <= FEW_BITS]
    bits = Counter(f"{bit} {direction}" for _, own in flips for bit, direction in own)
    slots = Counter(f"{found_at.place} slot {found_at.slot}" for found_at, _ in words)
    layers = Counter(f"{found_at.place} layer {found_at.word.layer}" for found_at, _ in words)
    stuck = next(iter(bits)) if len(bits) == 1 and bits.total() >= RECURRENCES else None
    stride = _stride(words)
    recurring = {name: count for name, count in slots.items() if count > 1}
    suggests = []
    if stuck:
        suggests.append(f"bit {stuck} in all {bits.total()} flips: a stuck line or cell, a failing part")
    elif flips and len(flips) == len(words):
        suggests.append("single bits changed: memory or a link, seldom software")
    if words and not flips:
        suggests.append("whole words changed: written over, rather software than a failing part")
    if recurring:
        suggests.append(f"damaged more than once: {counted(len(recurring), 'slot')}, the same physical place")
    if stride is not None:
        suggests.append(f"damaged slots are {stride} apart: a row of memory, or a wrong stride")
    return BitStatistics(
        words=len(words),
        flips=len(flips),
        bits=dict(sorted(bits.items())),
        stuck_bit=stuck,
        recurring_slots=recurring,
        recurring_layers={name: count for name, count in layers.items() if count >= RECURRENCES},
        stride=stride,
        suggests=tuple(suggests),
    )


def _stride(words: Iterable[tuple[WordAt, object]]) -> int | None:
    """The distance of a place's damaged slots, where it is one and more than 1."""
    by_place: dict[str, set[int]] = {}
    for found_at, _ in words:
        by_place.setdefault(found_at.place, set()).add(found_at.slot)
    for slots in by_place.values():
        ordered = sorted(slots)
        distances = {after - before for before, after in pairwise(ordered)}
        if len(ordered) > RECURRENCES and len(distances) == 1 and (distance := distances.pop()) > 1:
            return distance
    return None
