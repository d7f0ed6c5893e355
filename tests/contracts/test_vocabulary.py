"""Words and codes of canary_obs.vocabulary are those of the kernels, name by name."""

from __future__ import annotations

from enum import IntEnum

import pytest

from canary_kernels import layout
from canary_obs.vocabulary import Cause, CodedWord, Part, Phase, Plane, Reason, SlotState

CODED = [
    (Phase, layout.Phase),
    (Reason, layout.Reason),
    (Part, layout.Part),
    (Plane, layout.Plane),
    (Cause, layout.Unverified),
    (SlotState, layout.RecordState),
]
HOST_ONLY = Cause.EVICTED  # no kernel counts it
DEVICE_ONLY = layout.Part.IDENTITY  # a violation of the record itself has no part


@pytest.mark.parametrize(("words", "codes"), CODED, ids=lambda side: side.__name__)
def test_words_and_codes_are_those_of_the_kernels(words: type[CodedWord], codes: type[IntEnum]) -> None:
    on_host = {word.name: word.code for word in words if word is not HOST_ONLY}
    on_device = {code.name: int(code) for code in codes if code is not DEVICE_ONLY}
    assert on_host == on_device


@pytest.mark.parametrize("words", [words for words, _ in CODED])
def test_a_code_leads_back_to_its_word(words: type[CodedWord]) -> None:
    assert [words.from_code(word.code) for word in words] == list(words)
    assert [word.code for word in words] == sorted(word.code for word in words)
    with pytest.raises(ValueError, match=f"{words.__name__} has no code 99"):
        words.from_code(99)


def test_a_word_is_its_string() -> None:
    """Labels, JSON and msgpack carry the word, never the code."""
    assert Phase("head") is Phase.HEAD
    assert [phase.value for phase in Phase] == ["head", "tail", "sweep", "patrol", "hit"]
    assert f"{Reason.KV_DATA}" == "kv_data"


def test_codes_in_order_index_counter_rows() -> None:
    """report/counters.py zips words with slices of a row: codes count from 0 without gaps."""
    for words in (Phase, Reason, Cause):
        assert [word.code for word in words] == list(range(len(words)))
