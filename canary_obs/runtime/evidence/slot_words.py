"""Layout and meaning of the int64 words that are read for one slot and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from canary_kernels import layout
from canary_kernels.fingerprint import Suspect, WordChange
from canary_obs.runtime.device.state import Group
from canary_obs.slot_facts import ChangedWord, SlotFacts
from canary_obs.vocabulary import Part, Plane, SlotState

NEIGHBOURS = 16  # slots read around the violated one, itself included
SUSPECTS = 2  # KV words read per slot
WORD_BYTES = 4
# Records of all slots, then their fingerprints as the bytes are now, then the suspects' bytes, then history.
SLOT_WORDS = layout.RECORD_WORDS + 2
BYTES_AT = NEIGHBOURS * SLOT_WORDS
HISTORY_AT = BYTES_AT + SUSPECTS * WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """A KV word whose change would explain a part's `difference`: found - recorded, modulo 2^64."""

    part: Part
    difference: int
    suspect: Suspect


def neighbours_of(group: Group, slot: int) -> range:
    """At most NEIGHBOURS slots that include `slot`: of its page, or around it where pages are one slot."""
    page, slots = group.view.page_size, group.view.num_slots
    first, last = (slot // page * page, min(slots, (slot // page + 1) * page)) if page > 1 else (0, slots)
    start = max(first, min(slot - NEIGHBOURS // 2, last - NEIGHBOURS))
    return range(start, min(start + NEIGHBOURS, last))


def changed_words(leads: list[Lead], slot: SlotFacts, words: list[int]) -> tuple[ChangedWord, ...]:
    """The words that changed, at most one per part; without values if the slot was rewritten meanwhile."""
    found: dict[Part, list[ChangedWord]] = {}
    for number, lead in enumerate(leads):
        differs = int(slot.found[lead.part], 16) - int(slot.recorded[lead.part], 16)
        at = BYTES_AT + number * WORD_BYTES
        current = int.from_bytes(bytes(words[at : at + WORD_BYTES]), "little")
        if layout.unsigned(differs) != lead.difference:
            found.setdefault(lead.part, []).append(_changed_word(lead, None))
        elif (change := lead.suspect.explain(current)) is not None:
            found.setdefault(lead.part, []).append(_changed_word(lead, change))
    return tuple(changes[0] for changes in found.values() if len(changes) == 1)


def _changed_word(lead: Lead, change: WordChange | None) -> ChangedWord:
    source, word = lead.suspect.source, lead.suspect.word
    flipped = change.original ^ change.current if change else 1
    byte = (word * WORD_BYTES + ((flipped & -flipped).bit_length() - 1) // 8) % source.head_bytes
    return ChangedWord(
        part=lead.part,
        plane=Plane.from_code(source.plane),
        layer=source.layer,
        head=word * WORD_BYTES // source.head_bytes,
        element=byte // source.tensor.element_size(),
        dtype=str(source.tensor.dtype).removeprefix("torch."),
        word=word,
        original=f"{change.original:#010x}" if change else None,
        current=f"{change.current:#010x}" if change else None,
    )


def slot_facts(
    group: Group, words: list[int], neighbours: range, slot: int, *, reveal_tokens: bool
) -> SlotFacts:
    """Decode `slot`, one of `neighbours`, from the words that were read."""
    index = slot - neighbours.start
    record = words[index * layout.RECORD_WORDS :][: layout.RECORD_WORDS]
    fingerprints = record[layout.FINGERPRINT_K :]
    hashes = words[len(neighbours) * layout.RECORD_WORDS + 2 * index :][:2]
    high = layout.unsigned(record[layout.IDENTITY]) >> 32
    damaged = layout.fold(record[layout.IDENTITY] ^ record[layout.CHAIN]) != 0
    covered = group.view.sources if group.plan.bytes_per_slot else ()
    parts = {Part.from_code(source.part) for source in covered}
    return SlotFacts(
        slot=slot,
        state=None if damaged else SlotState.from_code(high & layout.STATE_MASK),
        position=high >> layout.STATE_BITS & layout.MAX_POSITION,
        recorded={part: _hex(fingerprints[part.code - layout.Part.K]) for part in Part if part in parts},
        found={part: _hex(hashes[part.code - layout.Part.K]) for part in Part if part in parts},
        token=record[layout.IDENTITY] & 0xFFFFFFFF if reveal_tokens else None,
        chain=_hex(record[layout.CHAIN]) if reveal_tokens else None,
    )


def _hex(value: int) -> str:
    return f"{layout.unsigned(value):#x}"
