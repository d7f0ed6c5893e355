"""Bytes of prefix hits and of copies are compared before the forward that reads them first."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from canary_kernels import layout
from canary_obs.records import Violation, Violations
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import MODELS
from canary_obs.runtime import first_reads, forward
from canary_obs.runtime.announcements import Announcements
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Phase, Reason, State
from tests.links import OneThreadLink
from tests.sizes import sized
from tests.unchecked import Report

QUIET = {"verify_on_hit": True, "idle_sweep": False, "patrol_budget": "off", "busy_sweep": False}
UNREAD = "prefix hits were read without a comparison of their bytes"


def ask(rig, tokens: int = 2) -> None:
    """The same prompt each time: from the second time on, most of it is a prefix hit."""
    length = 40 + 2 * rig.engine.config.page_size
    rig.engine.add_request(np.arange(length, dtype=np.int32) % 200 + 5, Sampling(max_tokens=tokens))
    rig.finish_requests()


def compared(rig) -> dict[str, int]:
    """Slots that were compared as hits, by group."""
    return {
        group.name: int(group.buffers.counters[layout.COUNT_HASHED + layout.Phase.HIT])
        for group in rig.canary.state.groups
    }


def violations(rig, link: LocalLink) -> list[Violation]:
    rig.canary.delivery.drain(5.0)
    found: list[Violation] = []
    while (message := link.next_message(0.0)) is not None:
        if isinstance(message, Violations):
            found += message.rows
    return found


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Slots of the latest hit, by group."""
    given: dict[str, list[int]] = {}
    hit = Announcements.hit

    def noted(self: Announcements, name: str, slots: torch.Tensor, step: int) -> None:
        given[name] = slots.tolist()
        hit(self, name, slots, step)

    monkeypatch.setattr(Announcements, "hit", noted)
    return given


@pytest.mark.parametrize("model", MODELS)
def test_damage_of_a_hit_is_seen_in_the_step_that_reads_it(make_rig, announced, model: str) -> None:
    link = OneThreadLink(capacity=1 << 12)
    rig = make_rig(model=model, link=link, **QUIET)
    ask(rig)
    ask(rig)
    given, groups = dict(announced), rig.canary.state.by_name
    assert compared(rig) == {name: len(given.get(name, ())) for name in groups}
    assert len(given["full"]) >= 32
    assert violations(rig, link) == []
    damaged = {name: slots[-1] for name, slots in given.items()}
    addresses = [locate_byte(groups[name].view.sources[-1], slot, 0) for name, slot in damaged.items()]
    for address in addresses:
        address.flip(4)
    step = rig.canary.step + 1
    ask(rig)
    for address in addresses:
        address.flip(4)
    seen = [row for row in violations(rig, link) if row.phase is Phase.HIT]
    assert {(row.group, row.slot) for row in seen} == set(damaged.items())
    assert {(row.reason, row.step) for row in seen} == {(Reason.KV_DATA, step)}


def test_damage_of_a_hit_that_is_shown_once_the_forward_has_begun(make_rig, announced, monkeypatch) -> None:
    link = OneThreadLink(capacity=1 << 12)
    rig = make_rig(link=link, **QUIET)
    ask(rig)
    ask(rig)
    slots = torch.tensor(announced["full"])
    address = locate_byte(rig.canary.state.by_name["full"].view.sources[-1], int(slots[-1]), 0)
    launched, begun = rig.canary.forward_launched, []

    def shown_late(view) -> None:
        begun.append(rig.canary.step)
        address.flip(4)
        rig.canary.hit("full", slots)
        address.flip(4)
        launched(view)

    monkeypatch.setattr(rig.canary, "forward_launched", shown_late)
    ask(rig, 1)
    seen = [(row.phase, row.reason, row.slot, row.step) for row in violations(rig, link)]
    assert seen == [(Phase.HIT, Reason.KV_DATA, int(slots[-1]), begun[0])]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_damaged_record_of_a_hit(make_rig, announced, backend: str) -> None:
    link = OneThreadLink(capacity=1 << 12)
    rig = make_rig(backend=backend, link=link, **QUIET)
    ask(rig)
    ask(rig)
    rig.canary.state.by_name["full"].memory[announced["full"][3], layout.CHAIN] ^= 1 << 40
    ask(rig)
    seen = {(row.reason, row.slot) for row in violations(rig, link) if row.phase is Phase.HIT}
    assert seen == {(Reason.RECORD, announced["full"][3])}


def test_clean_traffic_compares_every_hit_and_accuses_nobody(make_rig) -> None:
    for model in ("llama", "swa", *sized(("compressed", "speculative"), ("compressed",))):
        rig = make_rig(model=model, sweep_interval=20, verify_on_hit=True)
        rig.run(60)
        rig.finish_requests()
        rig.canary.check_everything()
        assert rig.canary.verdict() == (State.OK, ())
        assert all(compared(rig)[name] == count for name, count in rig.canary._adapter.prefix_hits().items())


def test_switched_off_hits_are_not_compared_and_nothing_is_owed(make_rig) -> None:
    rig = make_rig(**(QUIET | {"verify_on_hit": False}))
    ask(rig)
    ask(rig)
    assert rig.canary._adapter.prefix_hits()["full"] > 0
    assert not any(compared(rig).values())
    assert rig.canary.verdict() == (State.OK, ())


def test_long_hits_are_compared_in_chunks(make_rig, monkeypatch) -> None:
    monkeypatch.setattr(first_reads, "_CHUNK", 7)
    rig = make_rig(**QUIET)
    ask(rig)
    ask(rig)
    hits = rig.canary._adapter.prefix_hits()["full"]
    assert compared(rig)["full"] == hits
    runs = rig.canary.state.groups[0].buffers.counters[layout.COUNT_RUNS + layout.Phase.HIT]
    assert runs == -(-hits // 7)


# Ways in which the comparison can silently not run.


def nothing(*_: object) -> None:
    """A kernel that is not launched, a hook that is not called."""


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_hits_whose_bytes_are_not_compared(make_rig, unchecked: Report, monkeypatch, backend: str) -> None:
    rig = make_rig(backend=backend, **QUIET)
    ask(rig)
    monkeypatch.setattr(first_reads, "compare_slots", nothing)
    started = time.monotonic()
    ask(rig)
    unchecked(
        "bytes of prefix hits are not compared", "reference", rig.canary.verdict(),
        names="bytes were not checked: hit comparison, group full", seconds=time.monotonic() - started,
    )  # fmt: skip


def test_hits_that_the_adapter_does_not_show(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    monkeypatch.setattr(rig.canary, "hit", nothing)
    started = time.monotonic()
    ask(rig)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    unchecked("prefix hits are not shown", "reference", verdict, names=UNREAD, seconds=seconds)
    hits = rig.canary._adapter.prefix_hits()["full"]
    assert verdict[1] == (f"{UNREAD}: full {hits} slots",)
    rig.canary.hits.acknowledge()
    ask(rig)
    assert len(rig.canary.verdict()[1]) == 1  # the next hit is a debt of its own
    rig.canary.hits.acknowledge()
    assert rig.canary.verdict() == (State.OK, ())


def test_a_group_whose_hits_the_adapter_does_not_show(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(model="swa", **QUIET)
    ask(rig)
    hit = rig.canary.hit
    monkeypatch.setattr(rig.canary, "hit", lambda name, slots: hit(name, slots) if name == "full" else None)
    started = time.monotonic()
    ask(rig)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    unchecked(
        "prefix hits of a group are not shown", "reference", verdict, names=f"{UNREAD}: swa", seconds=seconds
    )


def test_an_engine_that_does_not_count_its_hits(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(**QUIET)
    monkeypatch.setattr(rig.canary.hits, "_counts", lambda: None)
    ask(rig)
    unchecked(
        "the engine does not count its prefix hits", "reference", rig.canary.verdict(),
        names="this engine does not count its prefix hits", seconds=0.0,
    )  # fmt: skip


def test_hits_that_the_engine_did_not_count(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    fixed = rig.canary._adapter.prefix_hits()
    monkeypatch.setattr(rig.canary.hits, "_counts", lambda: fixed)
    ask(rig)
    unchecked(
        "the engine's count of prefix hits stops", "reference", rig.canary.verdict(),
        names="prefix hits were announced that the engine did not count", seconds=0.0,
    )  # fmt: skip


# Copies.


def copy_slots(rig, source: list[int], destination: list[int]) -> None:
    """Bytes of slots to other slots, in all layers."""
    for store in rig.engine.runner.pool.stores:
        for tensor in store.tensors():
            tensor[destination] = tensor[source]


def free_slots(rig, count: int) -> list[int]:
    taken = rig.engine.scheduler.allocator.allocate(-(-count // rig.engine.config.page_size))
    return taken[:count].tolist()


@pytest.mark.parametrize("on_hit", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_copies_are_compared_when_the_next_forward_begins(make_rig, late: bool, on_hit: bool) -> None:
    link = OneThreadLink(capacity=1 << 12)
    rig = make_rig(link=link, **(QUIET | {"verify_on_hit": on_hit}))
    ask(rig)
    source = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[:8].tolist()
    destination = free_slots(rig, 8)
    rig.canary.copied("full", torch.tensor(source), torch.tensor([*destination[:7], -1]))
    if not late:
        copy_slots(rig, source, destination)
    step = rig.canary.step + 1
    ask(rig)
    seen = {(row.phase, row.reason, row.slot, row.step) for row in violations(rig, link)}
    expected = {(Phase.HIT, Reason.KV_DATA, slot, step) for slot in destination[:7]}
    assert seen == (expected if late else set())
    # Each once: later forwards compare them no more.
    hits = rig.canary._adapter.prefix_hits()["full"] if on_hit else 0
    assert compared(rig)["full"] == hits + 7
    if not late:
        assert rig.canary.verdict() == (State.OK, ())


def test_copies_that_are_not_compared(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    source = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[:8]
    destination = free_slots(rig, 8)
    copy_slots(rig, source.tolist(), destination)
    compare = forward.compare_slots

    def without_hits(*given, **named) -> None:
        if given[-1] is not layout.Phase.HIT:
            compare(*given, **named)

    monkeypatch.setattr(forward, "compare_slots", without_hits)
    started = time.monotonic()
    rig.canary.copied("full", source, torch.tensor(destination))
    ask(rig)
    unchecked(
        "copied bytes are not compared", "reference", rig.canary.verdict(),
        names="bytes were not checked: hit comparison, group full, 8 slots",
        seconds=time.monotonic() - started,
    )  # fmt: skip


def test_a_copy_that_is_forgotten_is_owed(make_rig) -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    source = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[:8]
    destination = free_slots(rig, 8)
    copy_slots(rig, source.tolist(), destination)
    rig.canary.copied("full", source, torch.tensor(destination))
    rig.canary.checks._first_reads._copied.clear()
    ask(rig)
    assert rig.canary.verdict()[0] is State.BLIND


def test_each_copy_is_owed_once(make_rig) -> None:
    rig = make_rig(**QUIET)
    ask(rig)
    source = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[:8]
    for _ in range(2):
        destination = free_slots(rig, 8)
        copy_slots(rig, source.tolist(), destination)
        rig.canary.copied("full", source, torch.tensor(destination))
        ask(rig)
        assert rig.canary.verdict() == (State.OK, ())


def test_a_copy_of_no_slots_is_not_kept(make_rig) -> None:
    rig = make_rig(**QUIET)
    nothing = torch.empty(0, dtype=torch.int64)
    rig.canary.copied("full", nothing, nothing)
    ask(rig)
    assert rig.canary.checks._first_reads._copied == []
    assert rig.canary.verdict() == (State.OK, ())
