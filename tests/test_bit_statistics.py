"""Patterns of failing memory are named; other changes are not taken for them."""

from __future__ import annotations

from typing import Any

from canary_obs.bit_statistics import WordAt, bit_statistics, flipped_bits
from canary_obs.slot_facts import ChangedWord
from canary_obs.vocabulary import Part


def word(original: str | None, current: str | None, *, layer: int = 0) -> ChangedWord:
    return ChangedWord(
        part=Part.K,
        layer=layer,
        head=0,
        element=0,
        dtype="float16",
        word=0,
        original=original,
        current=current,
    )


def found_at(slot: int, original: str = "0x0", current: str = "0x10", **others: Any) -> WordAt:
    return WordAt("rank 0 full", slot, word(original, current, **others))


def test_bits_are_numbered_from_the_least_significant_with_their_direction() -> None:
    assert flipped_bits(word("0x00000001", "0x80000000")) == ((0, "1_to_0"), (31, "0_to_1"))
    assert flipped_bits(word(None, "0x1")) == ()
    assert flipped_bits(word("0x5", "0x5")) == ()


def test_a_stuck_bit_is_one_position_in_one_direction() -> None:
    found = bit_statistics([found_at(slot) for slot in (3, 70, 11)])
    assert (found.stuck_bit, found.flips, found.words) == ("4 0_to_1", 3, 3)
    assert "a failing part" in found.suggests[0]
    both = bit_statistics([found_at(3), found_at(70), found_at(11, "0x10", "0x0")])
    assert both.stuck_bit is None
    assert bit_statistics([found_at(3), found_at(70)]).stuck_bit is None, "two may be chance"


def test_whole_words_suggest_software() -> None:
    found = bit_statistics([found_at(slot, "0x0", "0x3f803f80") for slot in (1, 2)])
    assert (found.flips, found.bits) == (0, {})
    assert "software" in found.suggests[0]


def test_places_recur() -> None:
    found = bit_statistics([found_at(5, layer=2), found_at(5, layer=2), found_at(90, layer=2)])
    assert found.recurring_slots == {"rank 0 full slot 5": 2}
    assert found.recurring_layers == {"rank 0 full layer 2": 3}


def test_a_constant_distance_is_a_row() -> None:
    assert bit_statistics([found_at(slot) for slot in (10, 74, 138, 202)]).stride == 64
    assert bit_statistics([found_at(slot) for slot in (10, 74, 138, 203)]).stride is None
    assert bit_statistics([found_at(slot) for slot in (10, 11, 12, 13)]).stride is None
    elsewhere = [WordAt("rank 1 full", slot, word("0x0", "0x1")) for slot in (138, 202)]
    assert bit_statistics([found_at(10), found_at(74), *elsewhere]).stride is None


def test_nothing_known_suggests_nothing() -> None:
    assert bit_statistics([]).suggests == ()
