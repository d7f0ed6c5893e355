"""Evidence of damaged bytes is counted by bit, and by where the bytes had come from."""

from __future__ import annotations

import msgspec

from canary_obs.hub.damage_account import UNKNOWN_PEER, DamageAccount
from canary_obs.records import CollectEvidence
from canary_obs.slot_facts import SlotEvent
from canary_obs.vocabulary import SlotEventKind
from tests.service.fakes import identity
from tests.service.test_incidents import evidence

WANTED = CollectEvidence(incident="inc", group="full", slot=3)


def came(*kinds: SlotEventKind) -> tuple[SlotEvent, ...]:
    return tuple(SlotEvent(kind=kind, step=step) for step, kind in enumerate(kinds))


def test_flipped_bits_are_counted() -> None:
    account = DamageAccount()
    account.add(evidence(WANTED))
    account.add(evidence(WANTED))
    assert account.bits == {(identity().key, 1, "0_to_1"): 2}
    assert not account.transferred


def test_a_block_counts_as_transferred_while_nothing_was_written_over_it() -> None:
    account = DamageAccount()
    account.add(evidence(WANTED, history=came(SlotEventKind.RECEIVED, SlotEventKind.WRITTEN)))
    account.add(evidence(WANTED, history=()))
    assert not account.transferred
    account.add(evidence(WANTED, history=came(SlotEventKind.WRITTEN, SlotEventKind.RECEIVED)))
    assert account.transferred == {(identity().key, UNKNOWN_PEER): 1}


def test_words_that_were_written_over_are_no_flips_and_intact_slots_no_damage() -> None:
    account = DamageAccount()
    whole = evidence(WANTED)
    (changed,) = whole.changed
    account.add(msgspec.structs.replace(whole, changed=(msgspec.structs.replace(changed, current="0x3ff"),)))
    assert not account.bits
    intact = msgspec.structs.replace(whole.slot, found=whole.slot.recorded)
    received = came(SlotEventKind.RECEIVED)
    account.add(msgspec.structs.replace(whole, slot=intact, changed=(), history=received))
    assert not account.transferred
