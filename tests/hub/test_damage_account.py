"""Damaged bytes are counted by bit in evidence, and by sender where they arrived damaged."""

from __future__ import annotations

import msgspec
import pytest

from canary_obs.hub.damage_account import PEERS_KEPT, DamageAccount
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import CollectEvidence
from canary_obs.vocabulary import OTHER_PEERS, Reason
from tests.service.fakes import identity, violation
from tests.service.test_incidents import evidence

WANTED = CollectEvidence(incident="inc", group="full", slot=3)


def found(**changes: object) -> ViolationEvent:
    return ViolationEvent(number=1, incident="inc", identity=identity(), violation=violation(**changes))


@pytest.fixture
def account() -> DamageAccount:
    return DamageAccount()


def test_flipped_bits_are_counted(account: DamageAccount) -> None:
    account.add(evidence(WANTED))
    account.add(evidence(WANTED))
    assert account.bits == {(identity().key, 1, "0_to_1"): 2}
    assert not account.transferred


def test_words_that_were_written_over_are_no_flips(account: DamageAccount) -> None:
    whole = evidence(WANTED)
    (changed,) = whole.changed
    account.add(msgspec.structs.replace(whole, changed=(msgspec.structs.replace(changed, current="0x3ff"),)))
    assert not account.bits


def test_bytes_count_as_transferred_when_they_arrived_damaged(account: DamageAccount) -> None:
    account.add_arrival(found(reason=Reason.KV_DATA, peer="prefill-1", slots=3))
    account.add_arrival(found(reason=Reason.KV_DATA))
    account.add_arrival(found(reason=Reason.CHAIN, peer="prefill-1"))
    assert account.transferred == {(identity().key, "prefill-1"): 3}


def test_peers_of_a_rank_are_bounded_and_none_is_lost(account: DamageAccount) -> None:
    for number in range(PEERS_KEPT + 5):
        account.add_arrival(found(reason=Reason.KV_DATA, peer=f"p{number}"))
    account.add_arrival(found(reason=Reason.KV_DATA, peer="p0"))
    assert len(account.transferred) == PEERS_KEPT + 1
    assert account.transferred[identity().key, OTHER_PEERS] == 5
    assert account.transferred[identity().key, "p0"] == 2
