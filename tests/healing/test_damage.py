"""What a finding says about blocks and requests."""

from __future__ import annotations

import msgspec

from canary_obs.healing.damage import Damage, damage_of, in_order
from canary_obs.healing.guard_rail import Limits
from canary_obs.healing.messages import DamageOutbox
from canary_obs.records import Violation
from canary_obs.vocabulary import HealPolicy, Part, Phase, Reason

FINDING = Violation(
    phase=Phase.PATROL, reason=Reason.KV_DATA, group="full", part=Part.K, step=4, event=1, slot=70,
    position=38, request=None, expected=None, actual=None, lag_steps=0, time_ns=0,
)  # fmt: skip


def of(*, drafted: bool = False, **more: object) -> Damage:
    damage = damage_of(msgspec.structs.replace(FINDING, **more), 3, 32, 9, "i", drafted=drafted)  # type: ignore[arg-type]
    assert damage is not None
    return damage


def test_bytes_are_of_a_block_and_nobody_knows_since_when() -> None:
    damage = of()
    assert (damage.group, damage.block, damage.offset, damage.found) == (3, 2, 6, 9)
    assert (damage.request, damage.good, damage.fresh, damage.kv_intact) == (None, None, False, False)


def test_links_are_of_one_request_and_new_with_the_forward_that_finds_them() -> None:
    damage = of(reason=Reason.CHAIN, phase=Phase.HEAD, request="r")
    assert (damage.request, damage.position, damage.good) == ("r", 37, 8)  # either of two slots
    assert of(reason=Reason.TOKEN, phase=Phase.TAIL, request="r").position == 0
    assert of(reason=Reason.CHAIN, phase=Phase.HEAD, request="r", redetection=True).good is None
    assert of(reason=Reason.CHAIN, phase=Phase.SWEEP).request is None


def test_bytes_that_every_forward_compares_are_new_too() -> None:
    damage = of(phase=Phase.TAIL)
    assert (damage.good, damage.fresh) == (8, True)


def test_what_is_written_over_harms_nobody() -> None:
    assert damage_of(msgspec.structs.replace(FINDING, phase=Phase.HEAD), 3, 32, 9, "") is None


def test_records_and_drafts_cost_no_request() -> None:
    assert of(reason=Reason.RECORD).kv_intact
    assert of(drafted=True).kv_intact


def test_what_waits_leaves_together_and_once() -> None:
    outbox = DamageOutbox()
    assert not outbox.due
    outbox.choose(HealPolicy.EVICT, Limits(3, 0.5))
    outbox.add(of())
    outbox.add(None)
    outbox.release(None)
    message = outbox.empty()
    assert (message.policy, message.limits, len(message.damages), message.releases) == (
        HealPolicy.EVICT, Limits(3, 0.5), 1, (),
    )  # fmt: skip
    assert not outbox.due
    assert outbox.empty()[3:] == ((), None)


def test_off_leaves_no_damage_waiting() -> None:
    outbox = DamageOutbox()
    outbox.choose(HealPolicy.EVICT, Limits(3, 0.5))
    outbox.add(of())
    outbox.choose(HealPolicy.OFF, Limits(3, 0.5))
    assert outbox.empty().damages == ()


def test_a_flood_is_bounded() -> None:
    outbox = DamageOutbox()
    for _ in range(5000):
        outbox.add(of())
    assert len(outbox.empty().damages) == 1024


def test_what_may_end_a_request_goes_first_unless_it_was_found_before() -> None:
    links = {"reason": Reason.CHAIN, "phase": Phase.HEAD, "request": "r"}
    again, new, stored = of(**links, redetection=True), of(**links), of(slot=71)
    assert (again.good, new.good, stored.good) == (None, 8, None)
    assert in_order([again, new, stored]) == [stored, again, new]
    assert in_order([new, again]) == [new, again]
