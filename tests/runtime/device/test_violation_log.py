"""Rows of the device's log are read once; a flood of one reason does not hide another."""

from __future__ import annotations

import torch

from canary_kernels import layout
from canary_kernels.layout import Phase, Reason
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.views import GroupView
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.device.violation_log import ViolationLog

ROWS = 4


def make(reveal: bool = False) -> tuple[DeviceState, ViolationLog]:
    view = GroupView(name="full", num_slots=8, page_size=1, sources=())
    state = DeviceState((view,), torch.device("cpu"), CanaryConfig(lane_rows=ROWS))
    return state, ViolationLog(state, reveal_tokens=reveal, remembered_steps=2, sweep_id=lambda: "s1")


def report(state: DeviceState, phase: Phase, reason: Reason, slot: int, step: int = 1) -> None:
    """One event as a kernel writes it, by the rule in layout.py."""
    buffers, number = state.groups[0].buffers, layout.lane(phase, reason)
    event = int(buffers.counters[number])
    buffers.counters[number] += 1
    place = 0 if event == 0 else 1 + (event - 1) % (ROWS - 1)
    stamp = step << layout.TICK_BITS
    buffers.violations[number, place] = torch.tensor([event + 1, stamp, slot, slot, 0, 0, -1, 5])


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
    report(state, Phase.HEAD, Reason.POSITION, 1, step=1)
    report(state, Phase.TAIL, Reason.POSITION, 1, step=9)
    found = {row.phase.value: row.request for row in log.read(state.flat.clone(), 9)}
    assert found == {"head": "a", "tail": None}
    log.remember_requests(2, ["b"])
    log.remember_requests(3, ["c"])
    report(state, Phase.HEAD, Reason.POSITION, 1, step=1)
    assert [row.request for row in log.read(state.flat.clone(), 9)] == [None]
