"""The sentence of an incident: right for each kind of fault, silent about what is not known."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from canary_obs.service.incident.facts import lead_of
from canary_obs.service.incident.sentence import sentence_of
from canary_obs.vocabulary import Part, Phase, Plane, Reason, SlotState
from tests.service.incident.harness import SLOT, STEP, changed, evidence, facts, incident_of, row, written

R = Reason
AT = facts(position=158)
DAMAGED = facts(position=158, found={Part.K: "0x2"})


def says(finding, *seen):
    return sentence_of(incident_of(finding, seen=seen))


def misplaced(**changes):
    return row(R.POSITION, expected="0x9e", actual="0x79", **changes)


def test_another_requests_context():
    assert says(misplaced(), evidence()) == (
        "r000002 at position 158 reads slot 1026 (group full), which holds position 121 of r000005: "
        "another request's context."
    )


@pytest.mark.parametrize(
    ("seen", "end"),
    [
        ((), "holds position 121: not the context that belongs there."),
        ((evidence(holders=()),), "121 of a request that ran in step 30: another request's context."),
        ((evidence(holders=(), history=(written(30, "r000002", "r1"),)),), "121: not the context"),
        ((evidence(holders=(), history=(written(30),)),), "121: not the context that belongs there."),
        ((evidence(holders=("r000002",)),), "of the same request: its own context in the wrong place."),
        ((evidence(holders=("r000002", "r5")),), "holds position 121; r5 uses the slot too."),
        # The slot was written, or read, after the finding; or another position lies there now.
        ((evidence(history=(written(STEP + 1, "r000005"),)),), "holds position 121: not the context"),
        ((evidence(prompted=True),), "holds position 121: not the context that belongs there."),
        ((evidence(step=STEP - 1),), "holds position 121: not the context that belongs there."),
        ((evidence(slot=facts(position=7)),), "holds position 121: not the context that belongs there."),
    ],
)
def test_a_wrong_position_says_less_when_less_is_known(seen, end):
    assert end in says(misplaced(), *seen)


def test_slots_of_a_run_are_counted():
    assert says(misplaced(slots=4)).endswith("; the next 3 slots likewise.")


def test_requests_that_share_a_slot_are_named_but_not_all():
    text = says(misplaced(), evidence(holders=tuple(f"r{number}" for number in range(9))))
    assert "of r0, r1, r2 and 6 more: another request's context." in text


@pytest.mark.parametrize(
    ("word", "what"),
    [
        (changed("0x3f800000", "0x7f800000"), "One bit (exponent bit 7) of slot 1026"),
        (changed("0x3f800000", "0xbf800000"), "One bit (the sign) of slot 1026"),
        (changed("0x3f800000", "0x3f800004"), "One bit (mantissa bit 2) of slot 1026"),
        (changed("0x00003f80", "0x0000bf80", "bfloat16"), "One bit (the sign) of slot 1026"),
        (changed("0x00000080", "0x00000000", "bfloat16"), "One bit (exponent bit 0) of slot 1026"),
        (changed("0x3f800000", "0xbf800000", "float16"), "One bit (the sign) of slot 1026"),
        (changed("0x00000001", "0x00000000", "uint8"), "One bit of slot 1026"),
        (changed("0x3f800000", "0x3f800004", plane=Plane.SCALES), "One bit of slot 1026"),
    ],
)
def test_a_bit_flip_names_the_bit(word, what):
    finding = row(R.KV_DATA, part=Part.K, expected="0x1", actual="0x2")
    text = says(finding, evidence(slot=DAMAGED, changed=(word,), holders=()))
    assert text.startswith(what)
    assert "layer 1, head 0, element 2" in text
    assert text.endswith("a bit flip.")


def test_more_damage_is_no_bit_flip():
    finding = row(R.KV_DATA, part=Part.V)
    word = changed("0x0", "0x3")
    assert "2 bits of one word of slot 1026" in says(finding, evidence(slot=DAMAGED, changed=(word,)))
    near = (*(facts(slot, found={Part.K: "0x9"}) for slot in (1027, 1028)), facts(1029))
    text = says(finding, evidence(slot=DAMAGED, neighbours=near))
    assert text.endswith("written: more than one word, and so did 2 of 3 slots around it.")
    gone = msgspec.structs.replace(word, original=None, current=None)
    assert says(finding, evidence(slot=DAMAGED, changed=(gone,))).endswith("changed after they were written.")
    assert "as recorded again" in says(finding, evidence(slot=AT))
    assert (
        says(finding)
        == "The V bytes of slot 1026 (group full, position 158) changed after they were written."
    )


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (row(R.UNWRITTEN, expected="0x2", actual="0x0"),
         "r000002 at position 158 reads slot 1026 (group full), which holds nothing that was written: "
         "stale or never filled."),
        (row(R.UNWRITTEN, actual="0x1"), "whose forward never finished."),
        (row(R.UNWRITTEN, actual="0x5"), "whose bytes have not arrived yet."),
        (row(R.UNWRITTEN, actual="0xffffffffffffffff", slot=-1), "reads a slot that does not exist (-1)"),
        (row(R.UNWRITTEN), "which holds no finished write."),
        (row(R.LOST_WRITE, part=Part.K),
         "The forward left the K bytes of slot 1026 (group full, position 158) as they were before: "
         "the write was lost."),
        (row(R.WRITE_TOKEN, phase=Phase.HEAD, expected="0x1f", actual="0x2f"),
         "r000002 was computed with another token than the scheduler gave it up to position 158: "
         "wrong token."),
        (row(R.TOKEN, phase=Phase.HEAD),
         "r000002 starts on a recorded prefix that is not its tokens up to position 158: wrong token."),
        (row(R.WRITE_POSITION, phase=Phase.HEAD, expected="0x9e", actual="0x3"),
         "r000002 was given position 3 for position 158 (slot 1026, group full): wrong position."),
        (row(R.WRITE_POSITION, slot=-1, position=None, actual="0xfff0"), "its prefix is 65520."),
        (row(R.RECORD), "The canary's own record of slot 1026 (group full) is damaged: nothing is known"),
        (row(R.CHAIN), "does not continue the slot before it: its context is not the one that was written"),
        (row(R.POSITION, phase=Phase.SWEEP, request="a,b", actual="0x3"),
         "The prefix cache leads at position 158 to slot 1026 (group full), which holds position 3"),
        (row(R.POSITION, request="a,b", actual="0x3"), "A request at position 158 reads slot 1026"),
    ],
)  # fmt: skip
def test_each_reason_has_its_sentence(finding, text):
    assert text in says(finding)


def test_a_chain_that_another_request_uses():
    seen = evidence(slot=AT)
    assert "r000005 uses it, another request's context." in says(row(R.CHAIN), seen)


def test_the_telling_finding_of_the_first_step_leads():
    later = row(R.LOST_WRITE, step=STEP + 3)
    incident = incident_of(row(R.CHAIN, slot=7), later, misplaced(), row(R.TOKEN))
    assert lead_of(incident).row.reason is Reason.POSITION


def test_no_finding_is_said():
    empty = msgspec.structs.replace(incident_of(misplaced()), first=(), latest=())
    assert sentence_of(empty) == "No finding of this incident is kept."


WORDS = st.none() | st.integers(0, (1 << 64) - 1).map(hex) | st.just("nonsense")
NAMES = st.text(max_size=300) | st.sampled_from(["r1", "r2", "a,b"])
ROWS = st.builds(
    row,
    st.sampled_from(Reason),
    phase=st.sampled_from(Phase), part=st.sampled_from([None, *Part]), slot=st.integers(-1, 5),
    position=st.none() | st.integers(0, 1 << 24), request=st.none() | NAMES, expected=WORDS, actual=WORDS,
    slots=st.integers(1, 9),
)  # fmt: skip
SEEN = st.builds(
    evidence,
    step=st.integers(STEP - 2, STEP + 9), prompted=st.booleans(),
    holders=st.lists(NAMES, max_size=5).map(tuple),
    slot=st.builds(
        facts, st.integers(0, 5), position=st.integers(0, 300), state=st.sampled_from([None, *SlotState]),
        found=st.dictionaries(st.sampled_from(Part), st.sampled_from(["0x1", "0x2"])),
    ),
    changed=st.lists(
        st.builds(changed, st.sampled_from(["0x0", "0x80000000"]), st.sampled_from(["0x1", "0x7"]),
                  st.sampled_from(["float32", "bfloat16", "uint8", "float64"])), max_size=2,
    ).map(tuple),
    history=st.lists(st.builds(written, st.integers(STEP - 5, STEP + 5), NAMES), max_size=3).map(tuple),
    writes_known=st.booleans(),
)  # fmt: skip
CONTEXT = "another request's context"


@settings(max_examples=150, derandomize=True)
@given(st.lists(ROWS, min_size=1, max_size=4), st.lists(SEEN, max_size=3))
def test_it_never_says_more_than_is_known(rows, seen):
    incident = incident_of(*rows, seen=tuple(seen))
    text, lead = sentence_of(incident), lead_of(incident)
    assert text.endswith(".")
    assert len(text) < 600
    found = lead.evidence
    if CONTEXT in text:
        assert found is not None
        assert not found.prompted
        others = [name for event in found.history for name in event.requests]
        assert found.holders or (others and lead.row.request not in others)
        assert lead.row.request not in found.holders
        assert all(event.step <= lead.row.step <= found.step for event in found.history)
    if text.endswith("a bit flip."):
        (word, *_) = found.changed
        assert (int(word.original, 16) ^ int(word.current, 16)).bit_count() == 1
    if match := re.search(r"which holds position (\d+)", text):
        assert int(match[1]) == int(lead.row.actual, 16)
    # Chains and token ids are never repeated, redacted or not.
    if lead.row.reason in (Reason.CHAIN, Reason.TOKEN, Reason.WRITE_TOKEN):
        changed_request = msgspec.structs.replace(lead.row, expected="0x1234567", actual="0x7654321")
        again = sentence_of(incident_of(changed_request, seen=tuple(seen)))
        assert not {"1234567", "7654321", str(0x1234567), str(0x7654321)} & set(re.findall(r"\w+", again))


def test_the_position_of_the_slot_is_the_readers_own():
    assert f"slot {SLOT}" in says(misplaced())
