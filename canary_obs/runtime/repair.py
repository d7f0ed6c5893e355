"""Puts back a slot's bytes where its fingerprints leave no doubt which one word changed, and to what."""

from __future__ import annotations

import torch

from canary_kernels import layout
from canary_kernels.fingerprint import Suspect, hash_slots, suspects
from canary_kernels.fingerprint.locate import read_words
from canary_obs.errors import RepairRefused
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.device.state import Group
from canary_obs.vocabulary import Part, SlotState

_WORD_BYTES = 4
_Change = tuple[Suspect, int, int]  # the word, what it holds and what was written


def repair_slot(group: Group, slot: int) -> str:
    """Put one changed word back, and compare the slot with its record again; returns which word it was.

    Raises RepairRefused, with the bytes as they were, where more or fewer than one word may have changed.
    Waits for the device.
    """
    if group.plan.bytes_per_slot != sum(source.slot_bytes for source in group.view.sources):
        raise RepairRefused("the fingerprints do not cover all bytes of the slot")
    recorded = _recorded(group, slot)
    part, stored, current = _differing(recorded, _hashes(group, slot))
    found = _changes(group, slot, part, stored, current)
    if len(found) != 1:
        raise RepairRefused(f"{len(found) or 'no'} single {'words' if found else 'word'} would explain it")
    ((suspect, holds, written),) = found
    _write(suspect, slot, written)
    if _hashes(group, slot) != recorded:
        _write(suspect, slot, holds)
        raise RepairRefused("the slot differed from its record all the same")
    return f"slot {slot}, part {part.value}, layer {suspect.source.layer}, word {suspect.word}"


def _recorded(group: Group, slot: int) -> tuple[int, int]:
    record = [int(word) for word in group.buffers.records[slot].tolist()]
    identity = record[layout.IDENTITY]
    if layout.fold(identity ^ record[layout.CHAIN]) != 0:
        raise RepairRefused("the record is damaged, too")
    state = layout.unsigned(identity) >> 32 & layout.STATE_MASK
    if SlotState.from_code(state) is not SlotState.COMPLETE:
        raise RepairRefused("the slot was not written by a forward that the canary saw")
    first, second = (layout.unsigned(word) for word in record[layout.FINGERPRINT_K :][:2])
    return first, second


def _hashes(group: Group, slot: int) -> tuple[int, int]:
    slots = group.slots_between(slot, slot + 1)
    first, second = (
        layout.unsigned(word) for word in hash_slots(group.backend, group.plan, slots)[0].tolist()
    )
    return first, second


def _differing(recorded: tuple[int, int], now: tuple[int, int]) -> tuple[Part, int, int]:
    parts = (Part.K, Part.V)
    found = [found for found in zip(parts, recorded, now, strict=True) if found[1] != found[2]]
    if len(found) != 1:
        raise RepairRefused("keys and values have changed" if found else "it holds something else by now")
    return found[0]


def _changes(group: Group, slot: int, part: Part, stored: int, current: int) -> list[_Change]:
    """Every word of every layer whose change alone would explain the difference."""
    found = []
    for suspect in suspects(group.plan, layout.Part(part.code), stored, current):
        holds = read_words(suspect.geometry, suspect.source, slot)[suspect.index]
        change = suspect.explain(holds)
        # The last word of an odd number of bytes is padded with zeros.
        if change is not None and change.original >> 8 * _size(suspect) == 0:
            found.append((suspect, holds, change.original))
    return found


def _size(suspect: Suspect) -> int:
    """Bytes of the word that are the slot's."""
    return min(_WORD_BYTES, suspect.geometry.num_bytes - suspect.index * _WORD_BYTES)


def _write(suspect: Suspect, slot: int, value: int) -> None:
    # The engine may have made its tensors in inference mode: none but it may write then.
    with torch.inference_mode():
        for number in range(_size(suspect)):
            address = locate_byte(suspect.source, slot, suspect.index * _WORD_BYTES + number)
            address.storage[address.offset] = value >> 8 * number & 0xFF
