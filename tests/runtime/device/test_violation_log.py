"""Rows of the device's log are read once; a flood of one reason does not hide another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_kernels import layout
from canary_kernels.layout import Phase, Reason
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.views import GroupView
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import ViolationLog

ROWS = 4


def make(reveal: bool = False, *, forget_seconds: float = 0.0) -> tuple[DeviceState, ViolationLog]:
    view = GroupView(name="full", num_slots=8, page_size=1, sources=())
    state = DeviceState((view,), torch.device("cpu"), CanaryConfig(lane_rows=ROWS))
    log = ViolationLog(
        state, reveal_tokens=reveal, remembered_steps=2, sweep_id=lambda: "s1", forget_seconds=forget_seconds
    )
    return state, log


def report(
    state: DeviceState,
    phase: Phase,
    reason: Reason,
    slot: int,
    step: int = 1,
    *,
    request: int = -1,
    tick: int = 0,
) -> None:
    """One event as a kernel writes it, by the rule in layout.py."""
    buffers, number = state.groups[0].buffers, layout.lane(phase, reason)
    event = int(buffers.counters[number])
    buffers.counters[number] += 1
    place = 0 if event == 0 else 1 + (event - 1) % (ROWS - 1)
    row = [0] * layout.ROW_WORDS
    row[layout.ROW_EVENT], row[layout.ROW_STEP] = event + 1, (step << layout.TICK_BITS) + tick
    row[layout.ROW_SLOT] = row[layout.ROW_POSITION] = slot
    row[layout.ROW_REQUEST], row[layout.ROW_PART] = request, layout.Part.IDENTITY
    row[layout.ROW_EXPECTED], row[layout.ROW_ACTUAL] = -1, 5
    buffers.violations[number, place] = torch.tensor(row)


def test_each_event_is_read_once() -> None:
    state, log = make()
    assert not log.has_unread(int(state.counters[: layout.NUM_LANES].sum()))
    report(state, Phase.SWEEP, Reason.KV_DATA, 3)
    assert log.has_unread(int(state.counters[: layout.NUM_LANES].sum()))
    (row,) = log.read(state.flat.clone(), 5)
    assert (row.slot, row.event, row.step, row.lag_steps, row.sweep_id) == (3, 1, 1, 4, "s1")
    assert (row.expected, row.actual) == ("0xffffffffffffffff", "0x5")
    assert not log.has_unread(int(state.counters[: layout.NUM_LANES].sum()))
    assert log.read(state.flat.clone(), 6) == []


def test_no_row_is_looked_at_that_was_read_or_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    state, log = make()
    looked_at, original = [0], torch.Tensor.tolist

    def counted(values: torch.Tensor) -> Any:
        looked_at[0] += values.numel()
        return original(values)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for slot in (1, 2):
        report(state, Phase.HEAD, Reason.CHAIN, slot)
        looked_at[0] = 0
        assert [row.slot for row in log.read(state.flat.clone(), 1)] == [slot]
        assert looked_at[0] == layout.COUNTER_WORDS + layout.ROW_WORDS


def test_a_flood_keeps_the_first_and_latest_rows_and_counts_the_rest() -> None:
    state, log = make()
    for slot in range(100):
        report(state, Phase.HEAD, Reason.CHAIN, slot)
    report(state, Phase.HEAD, Reason.UNWRITTEN, 7)
    rows = log.read(state.flat.clone(), 1)
    assert [row.slot for row in rows if row.reason.value == "chain"] == [0, 97, 98, 99]
    assert [row.slot for row in rows if row.reason.value == "unwritten"] == [7]
    assert log.dropped == 96
    report(state, Phase.HEAD, Reason.CHAIN, 5)
    assert [row.slot for row in log.read(state.flat.clone(), 1)] == [5]
    assert log.dropped == 96


def test_digests_and_tokens_are_redacted_unless_revealed() -> None:
    for reveal in (False, True):
        state, log = make(reveal)
        for reason in Reason:
            report(state, Phase.HEAD, reason, 1)
        shown = {row.reason.name for row in log.read(state.flat.clone(), 1) if row.expected is not None}
        hidden = {"CHAIN", "TOKEN", "WRITE_TOKEN"}
        assert shown == {reason.name for reason in Reason} - (set() if reveal else hidden)


def test_request_names_are_found_while_remembered() -> None:
    state, log = make()
    log.remember_requests(1, ["a"])
    report(state, Phase.HEAD, Reason.POSITION, 1, step=1, request=0)
    report(state, Phase.TAIL, Reason.POSITION, 1, step=9, request=0)
    found = {row.phase.value: row.request for row in log.read(state.flat.clone(), 9)}
    assert found == {"head": "a", "tail": None}
    log.remember_requests(2, ["b"])
    log.remember_requests(3, ["c"])
    report(state, Phase.HEAD, Reason.POSITION, 1, step=1, request=0)
    assert [row.request for row in log.read(state.flat.clone(), 9)] == [None]


def test_a_request_of_any_name_can_be_sent() -> None:
    """Clients choose request ids: a megabyte, or a text without encoding, must not hold back a finding."""
    state, log = make()
    log.remember_requests(1, ["a" * 256, "b" * (1 << 20), "c\ud800"])
    for request in range(3):
        report(state, Phase.HEAD, Reason.POSITION, request, request=request)
    found = log.read(state.flat.clone(), 1)
    assert [row.request for row in found] == ["a" * 256, "b" * 253 + "...", "c?"]


def total(state: DeviceState, log: ViolationLog) -> tuple[int, int]:
    findings, redetections = log.counts()
    raw = int(state.counters[: layout.NUM_LANES].sum())
    assert sum(map(sum, findings)) == log.findings == raw - sum(map(sum, redetections))
    return log.findings, raw - log.findings


def test_damage_that_stays_is_one_finding_where_it_was_met_first() -> None:
    """The head met it after the sweep: what counts is the order of the launches."""
    state, log = make(forget_seconds=60.0)
    report(state, Phase.HEAD, Reason.KV_DATA, 3, tick=2)
    report(state, Phase.SWEEP, Reason.KV_DATA, 3, tick=1)
    found = {row.phase.value: row.redetection for row in log.read(state.flat.clone(), 1)}
    assert found == {"head": True, "sweep": False}
    for step in range(2, 30):
        report(state, Phase.PATROL, Reason.KV_DATA, 3, step)
        (row,) = log.read(state.flat.clone(), step)
        assert row.redetection
    assert total(state, log) == (1, 29)
    report(state, Phase.PATROL, Reason.KV_DATA, 4, 30)
    report(state, Phase.PATROL, Reason.RECORD, 3, 30)
    assert [row.redetection for row in log.read(state.flat.clone(), 30)] == [False, False]
    assert total(state, log) == (3, 29)


def test_a_flood_of_what_is_known_drops_nothing() -> None:
    state, log = make(forget_seconds=60.0)
    for slot in range(ROWS):
        report(state, Phase.HEAD, Reason.CHAIN, slot)
        log.read(state.flat.clone(), 1)
    for step in range(2, 20):
        for slot in range(ROWS):
            report(state, Phase.HEAD, Reason.CHAIN, slot, step)
    report(state, Phase.HEAD, Reason.UNWRITTEN, 7, 20)
    assert [row.reason for row in log.read(state.flat.clone(), 20) if not row.redetection] == ["unwritten"]
    assert (total(state, log), log.dropped) == ((ROWS + 1, 18 * ROWS), 0)


def test_consecutive_slots_of_a_request_are_one_finding() -> None:
    """A wrong entry of a block table fails the same check in every slot of the block."""
    state, log = make(forget_seconds=60.0)
    log.remember_requests(1, ["a", "b"])
    for slot, request in ((2, 0), (3, 0), (4, 0), (5, 1)):
        report(state, Phase.HEAD, Reason.POSITION, slot, request=request)
    found = log.read(state.flat.clone(), 1)
    assert [(row.slot, row.request, row.slots, row.redetection) for row in found] == [
        (2, "a", 3, False), (3, "a", 1, True), (4, "a", 1, True), (5, "b", 1, False),
    ]  # fmt: skip
    assert total(state, log) == (2, 2)


def test_slots_of_no_request_and_of_other_places_are_findings_of_their_own() -> None:
    state, log = make(forget_seconds=60.0)
    for slot, request, step in ((1, -1, 1), (2, -1, 1), (4, 0, 1), (5, 0, 2)):
        report(state, Phase.HEAD, Reason.POSITION, slot, step, request=request)
    assert [row.slots for row in log.read(state.flat.clone(), 2)] == [1, 1, 1, 1]
    assert total(state, log) == (4, 0)
