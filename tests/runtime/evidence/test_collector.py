"""Evidence on a violated slot is read at the violation, exact, bounded and without tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
import torch

from canary_kernels import layout
from canary_obs.engine_api.views import GroupView
from canary_obs.hub.hub import Hub
from canary_obs.records import CollectEvidence, Evidence, Violations
from canary_obs.runtime.device import delayed_device_host
from canary_obs.runtime.device.byte_address import ByteAddress, locate_byte
from canary_obs.runtime.evidence import collector as collector_module
from canary_obs.runtime.evidence.slot_words import neighbours_of
from canary_obs.telemetry.incident_bundle import build_bundle
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Part, Phase, Plane, Reason, SlotEventKind, SlotState, State
from tests.links import OneThreadLink


@dataclass(slots=True)
class Damage:
    slot: int
    layer: int
    part: Part
    byte: int
    mask: int
    original: int
    address: ByteAddress


def cached_slots(rig) -> list[int]:
    return rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots.tolist()


def damage(rig, slot: int, source_index: int, byte: int, mask: int = 0x10) -> Damage:
    source = rig.canary.state.groups[0].view.sources[source_index]
    address = locate_byte(source, slot, byte)
    original = address.read()
    address.flip(mask)
    part = Part.K if source.part == 1 else Part.V
    return Damage(slot, source.layer, part, byte, mask, original, address)


def answers(link: LocalLink, kind: type = Evidence) -> list:
    found = []
    while (message := link.next_message(0.0)) is not None:
        if isinstance(message, kind):
            found.append(message)
    return found


def swept(rig) -> None:
    rig.canary.check_everything()


def ask(rig, link: LocalLink, slot: int, incident: str = "i1", group: str = "full") -> list[Evidence]:
    link.send_command(CollectEvidence(incident=incident, group=group, slot=slot))
    rig.canary.idle()
    rig.canary.idle()
    return answers(link)


@pytest.fixture
def link() -> LocalLink:
    return OneThreadLink(capacity=1 << 20)


@pytest.fixture
def rig(make_rig, link):
    rig = make_rig(link=link, idle_sweep=False, patrol_budget="off", reuse_data=False)
    rig.run(60)
    rig.finish_requests()
    answers(link)
    return rig


def test_a_changed_word_is_located_with_both_values(rig, link) -> None:
    draw = random.Random(4)
    sources = rig.canary.state.groups[0].view.sources
    slots = draw.sample(cached_slots(rig), len(sources))
    for index, slot in enumerate(slots):
        source = sources[index]
        injected = damage(rig, slot, index, draw.randrange(source.slot_bytes), 1 << draw.randrange(8))
        swept(rig)
        (found,) = ask(rig, link, slot, incident=f"i{index}")
        injected.address.flip(injected.mask)
        (change,) = found.changed
        head, inner = divmod(injected.byte, source.head_bytes)
        size = source.tensor.element_size()
        assert (change.part, change.layer, change.head) == (injected.part, injected.layer, head)
        assert change.element == inner // size
        assert change.dtype == str(source.tensor.dtype).removeprefix("torch.")
        original, current = int(change.original, 16), int(change.current, 16)
        shift = 8 * (injected.byte % 4)
        assert original >> shift & 0xFF == injected.original
        assert original ^ current == injected.mask << shift
        assert found.slot.recorded != found.slot.found
        assert (found.slot.intact, found.prompted, found.incident) == (False, False, f"i{index}")
        assert all(one.intact is not False for one in found.neighbours)


@pytest.mark.parametrize("model", ["fp8", "int8"])
def test_a_flipped_bit_of_a_scale_is_located_in_the_scales(make_rig, link, model: str) -> None:
    rig = make_rig(model=model, link=link, idle_sweep=False, patrol_budget="off", reuse_data=False)
    rig.run(60)
    rig.finish_requests()
    answers(link)
    sources = rig.canary.state.groups[0].view.sources
    scales = [index for index, source in enumerate(sources) if source.plane is layout.Plane.SCALES]
    for index, slot in zip(scales, cached_slots(rig), strict=False):
        injected = damage(rig, slot, index, 5)  # head 1: scales are float32
        swept(rig)
        (found,) = ask(rig, link, slot, incident=f"i{index}")
        injected.address.flip(injected.mask)
        (change,) = found.changed
        assert (change.plane, change.part, change.layer) == (Plane.SCALES, injected.part, injected.layer)
        assert (change.head, change.element, change.dtype) == (1, 0, "float32")
    counters = rig.canary.detach().groups["full"]
    assert counters.violations[Phase.PATROL][Reason.KV_DATA] == len(scales) == 4
    assert counters.redetections[Reason.KV_DATA] == len(scales)  # by the sweep


def test_flips_in_compressed_pools_are_located(make_rig, link) -> None:
    rig = make_rig(model="compressed", link=link, idle_sweep=False, patrol_budget="off", reuse_data=False)
    rig.run(60)
    answers(link)
    draw = random.Random(5)
    for group in rig.canary.state.groups[2:]:  # after `full` and `swa`
        states = (group.buffers.records[:, layout.IDENTITY] >> 32) & layout.STATE_MASK
        complete = torch.nonzero(states == layout.RecordState.COMPLETE).flatten().tolist()
        for source in group.view.sources:
            slot = draw.choice(complete)
            byte, mask = draw.randrange(source.slot_bytes), 1 << draw.randrange(8)
            address = locate_byte(source, slot, byte)
            address.flip(mask)
            swept(rig)
            (found,) = ask(rig, link, slot, incident=f"{group.name}{slot}", group=group.name)
            address.flip(mask)
            (change,) = found.changed
            assert (change.plane.name, change.layer) == (source.plane.name, source.layer)
            assert (change.part, change.word) == (Part.K, byte // 4)
            assert change.element == byte // source.tensor.element_size()
            assert int(change.original, 16) ^ int(change.current, 16) == mask << 8 * (byte % 4)
    groups = rig.canary.detach().groups
    hit = {name for name, group in groups.items() if group.violations[Phase.PATROL].get(Reason.KV_DATA)}
    assert hit == set(groups) - {"full", "swa"}


def test_neighbours_history_and_holders(make_rig, link) -> None:
    rig = make_rig(link=link, patrol_budget="off", prefix_data=True)
    rig.run(60)
    running = next(request for request in rig.engine.scheduler.running if request.computed > 10)
    slot = int(running.slots[running.computed - 1])
    damage(rig, slot, 0, 0)
    step = rig.canary.step
    rig.run(1)
    (found, *_) = ask(rig, link, slot)
    assert running.id in found.holders
    near = range(max(0, slot - 15), slot + 16)
    assert len(found.neighbours) == 15
    assert {one.slot for one in found.neighbours} < set(near) - {slot}
    assert found.slot.state is SlotState.COMPLETE
    written = [event for event in found.history if event.kind is SlotEventKind.WRITTEN]
    assert len(written) == 1
    assert written[0].step <= step
    assert running.id in written[0].requests
    assert found.writes_known


def test_requests_of_any_name_can_be_sent(make_rig, link, monkeypatch) -> None:
    """Clients choose request ids; one of a megabyte would make the service refuse the evidence."""
    rig = make_rig(link=link, patrol_budget="off", prefix_data=True)
    rig.run(60)
    running = next(request for request in rig.engine.scheduler.running if request.computed > 10)
    slot, long = int(running.slots[running.computed - 1]), "b" * (1 << 20)
    monkeypatch.setattr(rig.canary.evidence, "_holders", lambda _group, _slot: (long, running.id))
    monkeypatch.setattr(rig.canary.history, "_requests_at", lambda _step: (long, running.id))
    damage(rig, slot, 0, 0)
    (found, *_) = ask(rig, link, slot)
    short = ("b" * 253 + "...", running.id)
    assert found.holders == short
    assert [event.requests for event in found.history if event.requests] == [short]


@pytest.mark.parametrize(
    ("page_size", "num_slots", "slot", "expected"),
    [
        (1, 100, 50, range(42, 58)),
        (1, 100, 0, range(16)),
        (1, 100, 99, range(84, 100)),
        (1, 5, 2, range(5)),
        (8, 64, 17, range(16, 24)),
        (64, 256, 70, range(64, 80)),
        (64, 256, 127, range(112, 128)),
    ],
)
def test_neighbours_are_of_the_page_or_nearby(page_size, num_slots, slot, expected) -> None:
    view = GroupView(name="full", num_slots=num_slots, page_size=page_size, sources=())
    assert neighbours_of(SimpleNamespace(view=view), slot) == expected


def test_tokens_are_sent_only_when_revealed(rig, make_rig) -> None:
    for reveal in (False, True):
        link = OneThreadLink(capacity=1 << 20)
        other = make_rig(link=link, reveal_tokens=reveal)
        other.run(60)
        slot = cached_slots(other)[0]
        (found,) = ask(other, link, slot)
        for facts in (found.slot, *found.neighbours):
            assert (facts.token is not None) is reveal
            assert (facts.chain is not None) is reveal
        if reveal:
            record = other.canary.state.groups[0].buffers.records[slot]
            assert found.slot.token == int(record[0]) & 0xFFFFFFFF
            assert int(found.slot.chain, 16) == int(record[1]) % (1 << 64)


def test_the_slot_is_read_before_the_injector_restores_it(make_rig, link) -> None:
    rig = make_rig(
        link=link, perturb="real_kv_unused_cache=1", perturb_enabled=True, perturb_warmup=40,
        sweep_interval=5, reuse_data=False,
    )  # fmt: skip
    rig.run(60)
    violated = [row for message in answers(link, Violations) for row in message.rows]
    assert violated
    (found,) = ask(rig, link, violated[0].slot)
    assert not found.prompted
    assert len(found.changed) == 1
    assert found.slot.found[violated[0].part] == violated[0].actual


def test_an_unchecked_damaged_slot_is_explained_on_request(rig, link) -> None:
    slot = cached_slots(rig)[3]
    injected = damage(rig, slot, 1, 5)
    (found,) = ask(rig, link, slot)
    assert found.prompted
    assert [change.layer for change in found.changed] == [injected.layer]
    injected.address.flip(injected.mask)


def test_a_slot_rewritten_before_it_is_read_is_located_without_values(rig, link, monkeypatch) -> None:
    slot = cached_slots(rig)[3]
    injected = damage(rig, slot, 2, 5)
    monkeypatch.setattr(collector_module, "READS_IN_FLIGHT", 0)
    swept(rig)
    injected.address.flip(injected.mask)
    monkeypatch.undo()
    (found,) = ask(rig, link, slot)
    (change,) = found.changed
    assert (found.slot.intact, found.prompted) == (True, False)
    assert (change.layer, change.part, change.word) == (injected.layer, injected.part, 1)
    assert (change.original, change.current) == (None, None)


def test_announcements_are_part_of_the_history(rig, link) -> None:
    source, copy, arrived, gone = cached_slots(rig)[:4]
    rig.canary.copied("full", torch.tensor([source]), torch.tensor([copy]))
    rig.canary.received("full", torch.tensor([arrived]))
    rig.canary.invalidated("full", torch.tensor([gone, 1 << 40][:1]))
    kinds = {}
    for slot in (source, copy, arrived, gone):
        (found,) = ask(rig, link, slot, incident=str(slot))
        assert [event.step for event in found.history] == sorted(event.step for event in found.history)
        kinds[slot] = {event.kind for event in found.history} - {SlotEventKind.WRITTEN}
        state = found.slot.state
        assert (state is SlotState.BASELINE, state is SlotState.EMPTY) == (slot == arrived, slot == gone)
    assert kinds == {
        source: {SlotEventKind.COPIED_FROM},
        copy: {SlotEventKind.COPIED_TO},
        arrived: {SlotEventKind.RECEIVED},
        gone: {SlotEventKind.INVALIDATED},
    }


def test_without_write_history_only_announcements_are_known(make_rig, link) -> None:
    rig = make_rig(link=link, write_history=False)
    rig.run(60)
    (found,) = ask(rig, link, cached_slots(rig)[0])
    assert (found.history, found.writes_known) == ((), False)
    assert rig.canary.history.held_bytes == 0


def test_unknown_slots_are_ignored_and_the_queue_is_bounded(rig, link) -> None:
    assert ask(rig, link, 0, group="swa") == []
    assert ask(rig, link, rig.engine.config.num_slots) == []
    assert ask(rig, link, -1) == []
    # COMMANDS_PER_CALL of them arrive in one call.
    for slot in range(60):
        link.send_command(CollectEvidence(incident="flood", group="full", slot=slot))
    rig.canary.idle()
    for _ in range(collector_module.MAX_QUEUED):
        rig.canary.idle()
    assert len(answers(link)) == collector_module.MAX_QUEUED
    assert rig.canary.verdict()[0] is State.OK


def test_nothing_waits_for_a_copy_that_has_not_arrived(rig, link, monkeypatch) -> None:
    arrived = False
    monkeypatch.setattr(delayed_device_host.CompletedEvent, "query", lambda self: arrived)
    slots = cached_slots(rig)[: collector_module.READS_IN_FLIGHT + 2]
    assert [ask(rig, link, slot) for slot in slots] == [[]] * len(slots)
    assert len(rig.canary.evidence._in_flight) == collector_module.READS_IN_FLIGHT
    link.send_command(CollectEvidence(incident="also", group="full", slot=slots[0]))
    rig.canary.idle()
    arrived = True
    rig.canary.idle()
    rig.canary.idle()
    found = answers(link)
    assert {one.slot.slot for one in found} == set(slots)
    assert {one.incident for one in found if one.slot.slot == slots[0]} == {"i1", "also"}


def test_a_failing_collector_turns_the_state_blind(rig, link, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.canary.evidence, "_holders", broken)
    assert ask(rig, link, cached_slots(rig)[0]) == []
    assert rig.canary.health.faults["evidence"] == 1
    assert rig.canary.verdict()[0] is State.BLIND
    rig.run(20)
    assert rig.canary.run.armed


def test_from_a_flipped_bit_to_the_bundle(rig, link) -> None:
    hub = Hub()

    def carry() -> None:
        while (message := link.next_message(0.0)) is not None:
            hub.ingest(message, link.send_command)

    rig.canary.reporter.send_hello()
    slots = cached_slots(rig)[:30]
    injected = [damage(rig, slot, index % 4, 9) for index, slot in enumerate(slots)]
    swept(rig)
    for _ in range(4):
        carry()
        rig.canary.idle()
    (summary,) = hub.incidents.newest_first()
    bundle = build_bundle(hub, summary.id)
    assert bundle is not None
    assert bundle.incident.violations >= len(slots)
    assert bundle.incident.reasons.keys() == {Reason.KV_DATA}
    assert bundle.ranks[0].settings["mode"] == "log"
    assert {"torch", "python", "canary_obs"} <= bundle.ranks[0].versions.keys()
    assert 1 <= len(bundle.incident.evidence) <= 16
    for evidence in bundle.incident.evidence:
        (change,) = evidence.changed
        expected = next(one for one in injected if one.slot == evidence.slot.slot)
        assert (change.layer, change.part) == (expected.layer, expected.part)
    text = msgspec.json.encode(bundle).decode()
    assert '"token":null' in text
    assert '"token":1' not in text
    for one in injected:
        one.address.flip(one.mask)
