"""Puts back a block's bytes where fingerprints leave no doubt which word of a slot changed, and to what."""

from __future__ import annotations

from typing import NamedTuple

import torch

from canary_kernels import layout
from canary_kernels.fingerprint import Suspect, hash_slots, suspects
from canary_kernels.fingerprint.locate import read_words
from canary_obs.errors import RepairRefused
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.device.state import Group
from canary_obs.vocabulary import Part, SlotState

_WORD_BYTES = 4
_NAMED = 4  # words that a text names
_Hashes = tuple[int, int]  # of keys and of values
# Such a slot of the block has no fingerprint to be compared with.
_UNKNOWN = frozenset({SlotState.PENDING, SlotState.ADOPTED, SlotState.AWAITED})


class _Change(NamedTuple):
    """A word that is put back."""

    slot: int
    part: Part
    suspect: Suspect
    holds: int
    written: int

    def text(self) -> str:
        """For reports."""
        layer, word = self.suspect.source.layer, self.suspect.word
        return f"slot {self.slot}, part {self.part.value}, layer {layer}, word {word}"


class _Record(NamedTuple):
    """What a slot ought to hold."""

    hashes: _Hashes
    written: bool  # by a forward that the canary saw


def check_group(group: Group) -> None:
    """Raise RepairRefused where nothing of the group can be put back."""
    if group.plan.bytes_per_slot != group.view.slot_bytes:
        raise RepairRefused("the fingerprints do not cover all bytes of the slot")


def repair_block(group: Group, slots: range) -> str:
    """Put one changed word back in each damaged slot, and compare all slots again; returns which words.

    Raises RepairRefused, with the bytes as they were, where more or fewer than one word of a slot may have
    changed, or a slot cannot be compared. Waits for the device.
    """
    check_group(group)
    records, now = _records(group, slots), _hashes(group, slots)
    changes = [
        _change(group, slot, record, now[slot])
        for slot, record in records.items()
        if record.hashes != now[slot]
    ]
    if not changes:
        raise RepairRefused("it holds something else by now")
    for change in changes:
        _write(change, change.written)
    now = _hashes(group, slots)
    if any(record.hashes != now[slot] for slot, record in records.items()):
        for change in changes:
            _write(change, change.holds)
        raise RepairRefused("a slot differed from its record all the same")
    more = len(changes) - _NAMED
    return "; ".join(change.text() for change in changes[:_NAMED]) + (f"; {more} more" if more > 0 else "")


def _records(group: Group, slots: range) -> dict[int, _Record]:
    """Of all slots but those that nothing was written to."""
    found: dict[int, _Record] = {}
    for slot, record in zip(slots, group.buffers.records[slots.start : slots.stop].tolist(), strict=True):
        identity = record[layout.IDENTITY]
        if layout.fold(identity ^ record[layout.CHAIN]) != 0:
            raise RepairRefused(f"the record of slot {slot} is damaged, too")
        state = SlotState.from_code(layout.unsigned(identity) >> 32 & layout.STATE_MASK)
        if state in _UNKNOWN:
            raise RepairRefused(f"slot {slot} of the block has no fingerprint")
        if state is not SlotState.EMPTY:
            first, second = (layout.unsigned(word) for word in record[layout.FINGERPRINT_K :][:2])
            found[slot] = _Record((first, second), state is SlotState.COMPLETE)
    return found


def _hashes(group: Group, slots: range) -> dict[int, _Hashes]:
    found = hash_slots(group.backend, group.plan, group.slots_between(slots.start, slots.stop)).tolist()
    return {
        slot: (layout.unsigned(first), layout.unsigned(second))
        for slot, (first, second) in zip(slots, found, strict=True)
    }


def _change(group: Group, slot: int, record: _Record, now: _Hashes) -> _Change:
    if not record.written:
        raise RepairRefused("the slot was not written by a forward that the canary saw")
    parts = (Part.K, Part.V)
    differing = [found for found in zip(parts, record.hashes, now, strict=True) if found[1] != found[2]]
    if len(differing) != 1:
        raise RepairRefused("keys and values have changed")
    changes = _changes(group, slot, *differing[0])
    if len(changes) != 1:
        words = "words" if changes else "word"
        raise RepairRefused(f"{len(changes) or 'no'} single {words} would explain it")
    return changes[0]


def _changes(group: Group, slot: int, part: Part, stored: int, current: int) -> list[_Change]:
    """Every word of every layer whose change alone would explain the difference."""
    found = []
    for suspect in suspects(group.plan, layout.Part(part.code), stored, current):
        holds = read_words(suspect.geometry, suspect.source, slot)[suspect.index]
        change = suspect.explain(holds)
        # The last word of an odd number of bytes is padded with zeros.
        if change is not None and change.original >> 8 * _size(suspect) == 0:
            found.append(_Change(slot, part, suspect, holds, change.original))
    return found


def _size(suspect: Suspect) -> int:
    """Bytes of the word that are the slot's."""
    return min(_WORD_BYTES, suspect.geometry.num_bytes - suspect.index * _WORD_BYTES)


def _write(change: _Change, value: int) -> None:
    suspect = change.suspect
    # The engine may have made its tensors in inference mode: none but it may write then.
    with torch.inference_mode():
        for number in range(_size(suspect)):
            address = locate_byte(suspect.source, change.slot, suspect.index * _WORD_BYTES + number)
            address.storage[address.offset] = value >> 8 * number & 0xFF
