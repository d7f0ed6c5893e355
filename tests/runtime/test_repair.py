"""Which damage is put back, on a real engine's KV: one word, and nothing that may be more than one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from msgspec.structs import asdict, replace

from canary_kernels import layout
from canary_kernels.fingerprint import hash_slots
from canary_kernels.fingerprint.locate import read_words
from canary_kernels.hashing import layer_key_int, word_keys
from canary_obs.errors import RepairRefused
from canary_obs.healing.guard_rail import GuardRail, Limits
from canary_obs.heals import Heal
from canary_obs.records import Violation
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.device.state import Group
from canary_obs.runtime.patrol.async_checker import ScanJob
from canary_obs.runtime.repair import repair_block
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, SlotState
from tests.runtime.conftest import MakeRig, Rig
from tests.sizes import sized

TIMES = sized(1000, 100)
WORD, MASK = 4, (1 << 64) - 1


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    made = make_rig(patrol_budget="1B/s")
    made.run(60)
    return made


def written_slots(group: Group) -> list[int]:
    state = group.buffers.records[:, layout.IDENTITY] >> 32 & layout.STATE_MASK
    found: list[int] = (state == SlotState.COMPLETE.code).nonzero().flatten().tolist()
    return found


def content(group: Group, slot: int) -> list[list[int]]:
    return [
        read_words(bundle.geometry, source, slot)
        for bundle in group.plan.bundles
        for source in bundle.sources
    ]


def change(group: Group, slot: int, source: int, word: int, flips: int) -> None:
    """Invert the bits of `flips` in one word of a source."""
    for byte in range(WORD):
        locate_byte(group.view.sources[source], slot, word * WORD + byte).flip(flips >> 8 * byte & 0xFF)


def attempt(group: Group, slot: int, before: list[list[int]]) -> str:
    """What becomes of it; bytes that are not put back stay as they are."""
    damaged = content(group, slot)
    try:
        repair_block(group, range(slot, slot + 1))
    except RepairRefused as refused:
        assert content(group, slot) == damaged
        return str(refused)
    return "repaired" if content(group, slot) == before else "wrongly repaired"


def outcomes(group: Group, draw: random.Random, words: int) -> Counter[str]:
    """Of TIMES damages of so many words of keys, or of values, at most; more than one if it is not 1."""
    slots, sources, found = written_slots(group), group.view.sources, Counter[str]()
    for _ in range(TIMES):
        slot = draw.choice(slots)
        before = content(group, slot)
        count = 1 if words == 1 else draw.randint(2, words)
        part = draw.choice((layout.Part.K, layout.Part.V))
        places = [
            (one, word)
            for one, source in enumerate(sources)
            for word in range(source.slot_bytes // WORD)
            if source.part is part
        ]
        kind = draw.choice([lambda: draw.randrange(1, 1 << 32), lambda: 1 << draw.randrange(32)])
        damage = [(*place, kind()) for place in draw.sample(places, count)]
        for one in damage:
            change(group, slot, *one)
        result = attempt(group, slot, before)
        found[result] += 1
        for one in () if result == "repaired" else damage:
            change(group, slot, *one)
        assert content(group, slot) == before
    return found


def test_every_change_of_one_word_is_put_back(rig: Rig) -> None:
    assert outcomes(rig.canary.state.groups[0], random.Random(1), 1) == {"repaired": TIMES}


def test_no_damage_of_several_words_is_taken_for_one(rig: Rig) -> None:
    found = outcomes(rig.canary.state.groups[0], random.Random(2), 8)
    assert found == {"no single word would explain it": TIMES}


def test_a_change_of_keys_and_values_is_left(rig: Rig) -> None:
    group = rig.canary.state.groups[0]
    slot = written_slots(group)[0]
    for part in (layout.Part.K, layout.Part.V):
        source = next(at for at, one in enumerate(group.view.sources) if one.part is part)
        change(group, slot, source, 0, 1)
    assert attempt(group, slot, []) == "keys and values have changed"


def both_explain(first: int, second: int) -> tuple[int, int]:
    """Small a, b with a * first == b * second modulo 2^64: there always are some (Thue)."""
    ratio = second * pow(first, -1, 1 << 64) & MASK
    rows = (1 << 64, 0), (ratio, 1)
    while rows[1][0] >= 1 << 32:
        quotient = rows[0][0] // rows[1][0]
        rows = rows[1], (rows[0][0] - quotient * rows[1][0], rows[0][1] - quotient * rows[1][1])
    a, b = rows[1]
    assert (a * first - b * second) & MASK == 0
    return a, b


def test_a_change_that_two_words_would_explain_is_left(rig: Rig) -> None:
    group = rig.canary.state.groups[0]
    slot, source = written_slots(group)[0], group.view.sources[0]
    keys = [int(key) * layer_key_int(source.layer) & MASK for key in word_keys(0, 2).tolist()]
    a, b = both_explain(*keys)
    words = [0 if a > 0 else (1 << 32) - 1, (1 << 32) - 1 if b > 0 else 0]
    for word, value in enumerate(words):  # so that both changes would be possible
        now = content(group, slot)[0][word]
        change(group, slot, 0, word, now ^ value)
    hashes = hash_slots(group.backend, group.plan, torch.tensor([slot]))
    group.buffers.records[slot, layout.FINGERPRINT_K :] = hashes[0]
    before = content(group, slot)
    change(group, slot, 0, 0, words[0] ^ (words[0] + a))
    assert attempt(group, slot, before) == "2 single words would explain it"


def test_a_group_of_which_nothing_can_be_repaired_is_named_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, sent = make_rig(patrol_budget="1B/s", heal=HealPolicy.REPAIR), list[Heal]()
    rig.run(60)
    rig.finish_requests()
    monkeypatch.setattr(rig.canary._adapter, "block_tables", dict)
    monkeypatch.setattr(rig.canary.healing, "_send", sent.extend)
    group = rig.canary.state.groups[0]
    slots = written_slots(group)
    for few in (slots[:3], slots[3:6]):
        for slot in few:
            change(group, slot, 0, 0, 1)
        rig.canary.check_everything()
        refused = [heal for heal in sent if heal.action is HealAction.REPAIR]
        assert [(heal.outcome, heal.group) for heal in refused] == [(HealOutcome.REFUSED, group.name)]
        sent.clear()
        rig.canary.healing.choose(HealPolicy.REPAIR)


def test_all_slots_of_a_block_are_put_back_or_none(rig: Rig) -> None:
    group = rig.canary.state.groups[0]
    slots = written_slots(group)
    block = next(range(slot, slot + 4) for slot in slots if set(range(slot, slot + 4)) <= set(slots))
    before = [content(group, slot) for slot in block]
    change(group, block[0], 0, 0, 1)
    change(group, block[2], 1, 3, 1 << 31)
    assert repair_block(group, block).count("slot") == 2
    assert [content(group, slot) for slot in block] == before
    change(group, block[0], 0, 0, 1)
    for word in (0, 1):
        change(group, block[3], 0, word, 1)
    damaged = [content(group, slot) for slot in block]
    with pytest.raises(RepairRefused, match="no single word"):
        repair_block(group, block)
    assert [content(group, slot) for slot in block] == damaged
    group.adopt(torch.tensor([block[3]]))
    with pytest.raises(RepairRefused, match=f"slot {block[3]} of the block has no fingerprint"):
        repair_block(group, block)
    assert [content(group, slot) for slot in block] == damaged


@pytest.fixture
def healed(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, list[Heal], list[Violation]]:
    """With policy `repair`, at rest; what is reported of healing, and what is left to the scheduler."""
    rig, sent, left = make_rig(patrol_budget="1B/s", heal=HealPolicy.REPAIR), list[Heal](), list[Violation]()
    rig.run(60)
    rig.finish_requests()
    monkeypatch.setattr(rig.canary.healing, "_send", sent.extend)
    monkeypatch.setattr(rig.canary.healing, "found", lambda found, *_: left.extend(found))
    return rig, sent, left


def meet(rig: Rig, slot: int, times: int) -> None:
    """The patrol meets the slot so often before anybody reads what it has found."""
    job = ScanJob(
        group=rig.canary.state.groups[0], slots=range(slot, slot + 1), first_chunk=0, last_chunk=0, step=0
    )
    rig.canary.patrol.confirm([job] * times)
    rig.canary.delivery.drain(5.0)


def test_damage_that_two_checks_met_is_put_back_once(
    healed: tuple[Rig, list[Heal], list[Violation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, sent, left = healed
    healing, group, rows = rig.canary.healing, rig.canary.state.groups[0], list[Violation]()
    repair = healing.repair
    monkeypatch.setattr(healing, "repair", lambda found, *rest: (rows.extend(found), repair(found, *rest))[1])
    slot = written_slots(group)[0]
    change(group, slot, 0, 0, 1)
    meet(rig, slot, 2)
    assert [(heal.action, heal.outcome) for heal in sent] == [(HealAction.REPAIR, HealOutcome.DONE)]
    assert [row.redetection for row in rows] == [False, True]
    assert left == []
    # A row that is read later may be of the damage that was put back, or of what is there since.
    new = replace(rows[1], event=rows[1].event + 1)
    assert repair([rows[1]], lambda *_: False, "") == []
    assert repair([new], lambda *_: True, "") == [new]
    reported = replace(rows[1], redetection=False)
    assert repair([reported], lambda *_: False, "") == [reported]
    assert len(sent) == 1


def test_a_row_that_is_late_is_no_new_damage(
    healed: tuple[Rig, list[Heal], list[Violation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _, _ = healed
    healing, rows, tracker = rig.canary.healing, list[Violation](), rig.canary.taint.tracker
    repair = healing.repair
    monkeypatch.setattr(healing, "repair", lambda found, *rest: (rows.extend(found), repair(found, *rest))[1])
    slot = written_slots(rig.canary.state.groups[0])[0]
    change(rig.canary.state.groups[0], slot, 0, 0, 1)
    meet(rig, slot, 2)
    assert [row.redetection for row in rows] == [False, True]
    damages = list(tracker.damages)
    rig.canary.delivery.deliver([rows[1]])
    assert list(tracker.damages) == damages
    rig.canary.delivery.deliver([replace(rows[1], event=rows[1].event + 1)])
    assert len(tracker.damages) == len(damages) + 1


def test_a_full_log_is_not_compared_row_by_row(healed: tuple[Rig, list[Heal], list[Violation]]) -> None:
    rig, sent, _ = healed
    group, compared = rig.canary.state.groups[0], [0]
    rig.canary.healing._guard = GuardRail(Limits(100, 1.0))

    class Counted(Violation, frozen=True, kw_only=True):
        """Knows how often one was compared with another."""

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return self is other

        def __hash__(self) -> int:
            compared[0] += 1
            return id(self)

    slots = written_slots(group)[:16]  # each met twice: a full lane
    for slot in slots:
        change(group, slot, 0, 0, 1)
    job = ScanJob(group=group, slots=range(slots[-1] + 1), first_chunk=0, last_chunk=0, step=0)
    rig.canary.patrol.confirm([job] * 2)
    found = rig.canary.counter_reader.drain(rig.canary.step, 5.0)
    rows = [Counted(**asdict(row)) for row in found]
    assert len(rows) == 2 * len(slots)
    assert rig.canary.healing.repair(rows, lambda *_: True, "") == []
    assert Counter(heal.outcome for heal in sent) == {HealOutcome.DONE: len(slots)}
    assert compared[0] <= len(rows)


def test_what_was_there_is_read_before_it_is_put_back(
    healed: tuple[Rig, list[Heal], list[Violation]],
) -> None:
    rig, sent, _ = healed
    group = rig.canary.state.groups[0]
    slot = written_slots(group)[0]
    change(group, slot, 0, 3, 1)
    meet(rig, slot, 1)
    rig.canary.delivery.send_evidence()
    (evidence,) = [one for _, one in rig.canary.delivery._evidence._kept.values()]
    assert [(word.word, evidence.slot.intact) for word in evidence.changed] == [(3, False)]
    assert [heal.outcome for heal in sent] == [HealOutcome.DONE]


def test_beyond_the_limit_damage_is_left_to_the_scheduler_and_the_state_tells(
    healed: tuple[Rig, list[Heal], list[Violation]],
) -> None:
    rig, sent, left = healed
    rig.canary.healing._guard = GuardRail(Limits(1, 1.0))
    group = rig.canary.state.groups[0]
    first, second, *_ = written_slots(group)
    for slot in (first, second):
        change(group, slot, 0, 0, 1)
        meet(rig, slot, 1)
    assert [heal.outcome for heal in sent] == [HealOutcome.DONE, HealOutcome.LIMITED]
    assert [violation.slot for violation in left] == [second]
    assert any("damage is not put back any more" in why for why in rig.canary.verdict()[1])


def test_what_is_not_certain_is_refused(rig: Rig, make_rig: MakeRig) -> None:
    group = rig.canary.state.groups[0]
    first, second, *_ = written_slots(group)
    with pytest.raises(RepairRefused, match="something else by now"):
        repair_block(group, range(first, first + 1))
    change(group, first, 0, 0, 1)
    group.buffers.records[first, layout.CHAIN] ^= 1
    with pytest.raises(RepairRefused, match=f"record of slot {first} is damaged"):
        repair_block(group, range(first, first + 1))
    group.adopt(torch.tensor([second]))
    with pytest.raises(RepairRefused, match="has no fingerprint"):
        repair_block(group, range(second, second + 1))
    partly = make_rig(patrol_budget="1B/s", real_data="partial")
    partly.run(20)
    covered = partly.canary.state.groups[0]
    slot = written_slots(covered)[0]
    change(covered, slot, 0, 0, 1)
    with pytest.raises(RepairRefused, match="do not cover all bytes"):
        repair_block(covered, range(slot, slot + 1))
