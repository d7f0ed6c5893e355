"""Loads that were reported complete, on a tiny engine: what was sent, what arrived, what lay there before."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from canary_kernels import layout
from canary_kernels.hashing import chain_of
from canary_kernels.layout import RecordState
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Phase, Reason, State
from tests.runtime.test_announcements import cached_slots, counted, state_of

SIZE = 4


@pytest.fixture
def rig(make_rig):
    made = make_rig(patrol_budget="off", idle_sweep=False)
    made.run(40)
    made.finish_requests()
    return made


def blocks_of(rig, slots, tokens=None) -> LoadedBlocks:
    """`tokens`: of the request from its position 0 on."""
    slots = slots.view(-1, SIZE)
    count = slots.numel()
    tokens = torch.arange(count) + 7000 if tokens is None else tokens
    chains = chain_of(tokens)[:-1]
    shape = slots.shape
    return LoadedBlocks(
        slots=slots, tokens=tokens.view(shape), positions=torch.arange(count).view(shape),
        chains=chains.view(shape),
    )  # fmt: skip


def arrived(count: int, sent: list[list[tuple[int, int]]] | None = None, stop: int = SIZE) -> ArrivedBlocks:
    sent = sent or [[]] * count
    width = max(map(len, sent))
    padded = [[*copies, *[(0, 0)] * (width - len(copies))] for copies in sent]
    return ArrivedBlocks(
        first=torch.zeros(count, dtype=torch.int64), stop=torch.full((count,), stop),
        copies=torch.tensor([len(copies) for copies in sent]), filled=torch.full((count,), stop),
        sent=torch.tensor(padded, dtype=torch.int64).view(count, width, 2), peer="prefill-1",
    )  # fmt: skip


def folds(rig, slots: torch.Tensor) -> list[tuple[int, int]]:
    found = rig.canary.block_folds("full", slots.view(-1, SIZE))
    assert found[:, 0].tolist() == [1] * found.shape[0], "not all complete"
    return [tuple(row) for row in found[:, 1:].tolist()]


def load(rig, source: torch.Tensor, destination: torch.Tensor, **how) -> None:
    """A load of `source`'s bytes into `destination`; how: sent, and `fault`, called instead of the copy."""
    sent = how.get("sent")
    kv = rig.engine.runner.pool.kv
    rig.canary.load_begun("a", "full", blocks_of(rig, destination))
    if "fault" in how:
        how["fault"](kv)
    else:
        kv[:, :, destination] = kv[:, :, source]
    count = destination.numel() // SIZE
    rig.canary.load_ended("a", "full", arrived(count, [[copy] for copy in sent] if sent else None))


def found_at_head(rig) -> dict[Reason, int]:
    rig.canary.reporter.send_violations(rig.canary.counter_reader.drain(rig.canary.step, 1.0))
    values = rig.canary.counter_reader.sample.values
    lanes = layout.Phase.HEAD * layout.NUM_REASONS
    return {reason: int(values[lanes + reason.code]) for reason in Reason if values[lanes + reason.code]}


def loads(rig) -> tuple[int, int]:
    """Slots compared with what was sent, and of which nothing is known."""
    counters = group_counters(rig.canary.state, rig.canary.counter_reader)["full"]
    return counters.loads_compared, counters.loads_left_out


@pytest.fixture
def places(rig) -> tuple[torch.Tensor, torch.Tensor]:
    cached = cached_slots(rig)
    return cached[: 2 * SIZE], cached[2 * SIZE : 4 * SIZE]


def test_what_was_known_of_a_load_is_kept_until_those_of_a_later_step_are_judged(rig):
    """Another stream may judge it than the one on which it began, and this gives memory away at once."""
    loads = rig.canary._announcements.loads
    first, second = cached_slots(rig)[:SIZE], cached_slots(rig)[SIZE : 2 * SIZE]
    for step, (load, slots) in enumerate((("first", first), ("second", second))):
        loads.begin(load, "full", blocks_of(rig, slots), step)
        begun = weakref.ref(loads._begun[load, "full"].old)
        if step == 0:
            kept = begun
        loads.end(load, "full", arrived(1), step)
        assert begun() is not None
    assert kept() is None


def test_bytes_that_equal_what_was_sent_are_as_good_as_written(rig, places) -> None:
    source, destination = places
    load(rig, source, destination, sent=folds(rig, source))
    assert found_at_head(rig) == {}
    assert loads(rig) == (2 * SIZE, 0)
    assert state_of(rig, destination) == {RecordState.COMPLETE}
    assert counted(rig) == {}
    # The record says what the request is to have there, sealed, and so do records made of it later.
    assert folds(rig, destination) == folds(rig, source)
    rig.engine.runner.pool.kv[0, 0, destination[3], 0, 0] += 1
    assert counted(rig) == {Reason.KV_DATA: 1}


def test_one_of_several_copies_was_sent(rig, places) -> None:
    source, destination = places
    rig.canary.load_begun("a", "full", blocks_of(rig, destination))
    kv = rig.engine.runner.pool.kv
    sent = [[(1, 2), copy, (3, 4)] for copy in folds(rig, source)]
    kv[:, :, destination] = kv[:, :, source]
    rig.canary.load_ended("a", "full", arrived(2, [sent[0], sent[1][:2]]))
    assert found_at_head(rig) == {}
    assert loads(rig) == (2 * SIZE, 0)


def test_a_byte_that_changed_on_the_way_is_found(rig, places) -> None:
    source, destination = places
    sent = folds(rig, source)

    def flipped(kv):
        kv[:, :, destination] = kv[:, :, source]
        kv[1, 0, destination[5], 0, 0] += 1

    load(rig, source, destination, sent=sent, fault=flipped)
    rig.canary.reporter.send_violations = (rows := []).extend
    assert found_at_head(rig) == {Reason.KV_DATA: 1}
    assert [(row.peer, row.request) for row in rows] == [("prefill-1", "a")]
    assert state_of(rig, destination[:SIZE]) == {RecordState.COMPLETE}
    assert state_of(rig, destination[SIZE:]) == {RecordState.BASELINE}
    assert counted(rig) == {}, "found once"


def test_slots_exchanged_within_a_block_are_found(rig, places) -> None:
    source, destination = places
    sent = folds(rig, source)

    def exchanged(kv):
        kv[:, :, destination] = kv[:, :, source[[1, 0, *range(2, 2 * SIZE)]]]

    load(rig, source, destination, sent=sent, fault=exchanged)
    assert found_at_head(rig) == {Reason.KV_DATA: 2}


@pytest.mark.parametrize("as_expected", [True, False])
def test_what_was_said_beforehand_of_a_load_is_taken_if_all_of_it_arrives(rig, places, as_expected) -> None:
    source, destination = places
    sent = [[copy] for copy in folds(rig, source)]
    wrong = arrived(2, [[(1, 2)], [(3, 4)]])
    right = arrived(2, sent)
    expected = right if as_expected else wrong
    rig.canary.load_begun("a", "full", replace(blocks_of(rig, destination), expected=expected))
    kv = rig.engine.runner.pool.kv
    kv[:, :, destination] = kv[:, :, source]
    rig.canary.load_ended("a", "full", right)
    assert found_at_head(rig) == {}
    assert loads(rig) == (2 * SIZE, 0)


@pytest.mark.parametrize("fault", [None, "flipped", "lost"])
@pytest.mark.parametrize("then", ["all of it arrives", "part of it arrives", "it fails", "it is dropped"])
def test_what_was_copied_is_hashed_before_it_is_reported_and_judged_then(rig, places, then, fault) -> None:
    source, destination = places
    told = arrived(2, [[copy] for copy in folds(rig, source)])
    kv = rig.engine.runner.pool.kv
    if fault != "lost":
        kv[:, :, destination] = kv[:, :, source]
    kv[1, 0, destination[5], 0, 0] += fault == "flipped"
    blocks = replace(blocks_of(rig, destination), expected=told, copied=[torch.Event("cpu")])
    rig.canary.load_begun("a", "full", blocks)
    assert found_at_head(rig) == {}, "nobody has said that it arrived"
    assert loads(rig) == (0, 0)
    if then == "all of it arrives":
        kv[0, 0, destination[0], 0, 0] += 1  # after its copy's end: other checks find it
        rig.canary.load_ended("a", "full", told)
        found = {None: {}, "flipped": {Reason.KV_DATA: 1}, "lost": {Reason.LOST_LOAD: 4}}[fault]
        assert found_at_head(rig) == found
        assert loads(rig) == (2 * SIZE, 0)
        assert counted(rig) == {Reason.KV_DATA: 1}
    elif then == "part of it arrives":
        rig.canary.load_ended("a", "full", arrived(2, stop=SIZE - 1))
        assert found_at_head(rig) == ({Reason.LOST_LOAD: 4} if fault == "lost" else {})
        assert loads(rig) == (0, 2 * (SIZE - 1))
    else:
        (rig.canary.load_failed if then == "it fails" else rig.canary.load_dropped)("a")
        rig.canary.load_ended("a", "full", told)
        assert found_at_head(rig) == {}
        assert loads(rig) == (0, 0)
    assert rig.canary.health.faults.total() == 0


def test_detach_waits_for_what_still_reads_the_engines_memory(rig, places) -> None:
    """vLLM unmaps the KV of a worker that it puts to sleep."""
    _, destination = places
    rig.canary.load_begun("a", "full", blocks_of(rig, destination))
    running = iter([False] * 7)
    rig.canary._announcements.loads._last = SimpleNamespace(query=lambda: next(running, True))
    rig.canary.detach()
    assert next(running, "all") == "all"


def test_a_load_that_is_never_copied_ends_the_wait_and_is_a_fault(rig, monkeypatch) -> None:
    loads = rig.canary._announcements.loads
    monkeypatch.setattr(loads, "_last", SimpleNamespace(query=lambda: False))
    with pytest.raises(TimeoutError, match=r"still to be hashed after 0\.01 s; the rule is"):
        loads.close(0.01)
    close = loads.close
    monkeypatch.setattr(loads, "close", lambda _: close(0.01))
    assert rig.canary.detach().observer_faults == {"announce": 1}


@pytest.mark.parametrize("known", [True, False])
def test_a_load_that_left_the_bytes_as_they_were_is_lost(rig, places, known) -> None:
    source, destination = places
    sent = folds(rig, source) if known else None
    load(rig, source, destination, sent=sent, fault=lambda kv: None)
    assert found_at_head(rig) == {Reason.LOST_LOAD: 4}  # K and V of two blocks
    assert loads(rig) == ((2 * SIZE, 0) if known else (0, 2 * SIZE))


@pytest.mark.parametrize("known", [True, False])
def test_a_part_that_was_left_out_is_lost(rig, places, known) -> None:
    source, destination = places
    sent = folds(rig, source) if known else None

    def only_keys(kv):
        kv[:, 0, destination] = kv[:, 0, source]

    assert rig.engine.runner.pool.kv.shape[1] == 2
    load(rig, source, destination, sent=sent, fault=only_keys)
    assert found_at_head(rig) == {Reason.LOST_LOAD: 2}


def test_a_lost_load_into_a_pool_that_was_never_written_is_found(rig) -> None:
    group, kv = rig.canary.state.groups[0], rig.engine.runner.pool.kv
    slots = cached_slots(rig)[: 2 * SIZE]
    group.forget(slots)
    kv[:, :, slots] = 0
    load(rig, slots, slots, fault=lambda kv: None)
    assert found_at_head(rig) == {Reason.LOST_LOAD: 4}


def test_the_same_tokens_may_leave_the_same_bytes(rig, places) -> None:
    """A block that was evicted, and loaded again into the same place; the second time without records."""
    source, destination = places
    load(rig, source, destination, sent=folds(rig, source))
    load(rig, source, destination)
    load(rig, source, destination)  # over a baseline
    assert found_at_head(rig) == {}
    assert loads(rig) == (2 * SIZE, 4 * SIZE)


def test_what_lay_there_is_not_known_and_so_not_accused(rig, places) -> None:
    source, destination = places
    rig.canary.received("full", destination)  # a baseline of unknown tokens
    load(rig, source, destination, fault=lambda kv: None)
    assert found_at_head(rig) == {}


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("fault", [None, "lost", "damaged"])
def test_a_load_without_tokens_is_compared_with_what_was_sent_and_gets_a_baseline(
    rig, places, sent, fault
) -> None:
    source, destination = places
    unknown = LoadedBlocks(slots=destination.view(-1, SIZE), tokens=None, positions=None, chains=None)
    copies = [[copy] for copy in folds(rig, source)] if sent else None
    rig.canary.load_begun("a", "full", unknown)
    assert state_of(rig, destination) == {RecordState.AWAITED}
    kv = rig.engine.runner.pool.kv
    if fault != "lost":
        kv[:, :, destination] = kv[:, :, source]
    if fault == "damaged":
        kv[:, :, destination[0]] += 1
    rig.canary.load_ended("a", "full", arrived(2, copies))
    assert state_of(rig, destination) == {RecordState.BASELINE}
    both = {"lost": {Reason.LOST_LOAD: 4}, "damaged": {Reason.KV_DATA: 2}}  # of two blocks, or one: K and V
    assert found_at_head(rig) == (both.get(fault, {}) if sent else {})
    assert loads(rig) == ((2 * SIZE, 0) if sent else (0, 2 * SIZE))
    rig.canary.check_everything()
    assert rig.canary.verdict()[0] is (State.VIOLATED if sent and fault else State.OK)


def test_what_has_not_arrived_stays_awaited(rig, places) -> None:
    source, destination = places
    rig.canary.load_begun("a", "full", blocks_of(rig, destination))
    kv = rig.engine.runner.pool.kv
    kv[:, :, destination] = kv[:, :, source]
    rig.canary.load_ended("a", "full", arrived(2, stop=SIZE - 1))
    last = destination.view(-1, SIZE)[:, -1]
    assert state_of(rig, last) == {RecordState.AWAITED}
    assert state_of(rig, destination.view(-1, SIZE)[:, :-1].flatten()) == {RecordState.BASELINE}


def test_slots_of_a_failed_load_must_be_written_before_they_are_read(rig, places) -> None:
    slots = cached_slots(rig)[:SIZE]
    rig.canary.load_begun("a", "full", blocks_of(rig, slots))
    rig.canary.load_failed("a")
    assert state_of(rig, slots) == {RecordState.EMPTY}
    rig.canary.load_ended("a", "full", arrived(1))  # too late
    assert state_of(rig, slots) == {RecordState.EMPTY}
    rig.canary.check_everything()
    final = rig.canary.detach()
    assert final.groups["full"].violations[Phase.SWEEP][Reason.UNWRITTEN] == SIZE
    assert final.state is State.VIOLATED


def test_a_dropped_load_reports_nothing(rig, places) -> None:
    _, destination = places
    rig.canary.load_begun("a", "full", blocks_of(rig, destination))
    rig.canary.load_dropped("a")
    rig.canary.load_ended("a", "full", arrived(2))
    assert state_of(rig, destination) == {RecordState.AWAITED}
    assert found_at_head(rig) == {}


def test_folds_are_of_records_not_of_bytes(rig, places) -> None:
    source, _ = places
    sent = folds(rig, source)
    rig.engine.runner.pool.kv[:, :, source] += 1
    assert folds(rig, source) == sent
    group = rig.canary.state.groups[0]
    group.receive(source[:1])
    found = rig.canary.block_folds("full", source.view(-1, SIZE))
    assert found[:, 0].tolist() == [0, 1], "a baseline vouches for nothing"
    of_states = rig.canary.block_folds("full", source.view(-1, SIZE), baselines=True)
    assert of_states[:, 0].tolist() == [1, 1], "but for what is stored now"
    assert torch.equal(of_states[:, 1:], found[:, 1:])
    part = source.view(-1, SIZE).clone()
    part[1, 2:] = -1
    short = rig.canary.block_folds("full", part)
    assert short[1, 0] == 1
    assert short[1, 1] != found[1, 1]


def test_folds_of_shares_add_up(rig, places) -> None:
    """What a receiver with other shards gets: one fold per sender."""
    group = rig.canary.state.groups[0]
    draw = np.random.default_rng(3)
    shares = torch.from_numpy(draw.integers(-(2**63), 2**63 - 1, (3, 5, SIZE, 2)))
    slots = cached_slots(rig)[: 5 * SIZE]

    def folded(fingerprints):
        group.buffers.records[slots, layout.FINGERPRINT_K :] = fingerprints.reshape(-1, 2)
        return rig.canary.block_folds("full", slots.view(-1, SIZE))[:, 1:].clone()

    assert torch.equal(sum(map(folded, shares)), folded(shares.sum(0)))
    assert not torch.equal(folded(shares[0]), folded(shares[0].flip(1)))


def test_every_slot_of_a_load_is_accounted_for(rig, places) -> None:
    source, destination = places
    load(rig, source, destination, sent=folds(rig, source))
    load(rig, source, destination)
    rig.canary.check_everything()
    assert rig.canary.verdict() == (State.OK, ())
