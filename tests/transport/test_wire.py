from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from canary_obs.errors import WireError
from canary_obs.hub.message_check import LABEL_LENGTH, RANKS, check_message
from canary_obs.records import (
    Acknowledge,
    CancelSweep,
    Command,
    EngineMessage,
    Goodbye,
    Identity,
    Pause,
    Ping,
    Resume,
    StartSweep,
    StepUnderWay,
    SweepReport,
    Violation,
    Violations,
)
from canary_obs.runtime.report.reporter import BACKLOG
from canary_obs.slot_facts import request_name
from canary_obs.transport import wire
from canary_obs.vocabulary import Part, Phase, Reason, SweepStatus
from tests.service.fakes import hello, identity, progress, snapshot, tainted, violation

ME = identity()
MESSAGES = [
    hello(ME),
    snapshot(ME, 3, violations=2),
    StepUnderWay(identity=ME, seconds=7.5),
    Violations(identity=ME, rows=(violation(), violation(position=None, request=None))),
    SweepReport(identity=ME, progress=progress("a", SweepStatus.RUNNING)),
    tainted(ME, 1, "r1", "r2"),
    Goodbye(identity=ME, final=snapshot(ME, 4)),
]
COMMANDS = [
    StartSweep(id="a", groups=("full",), data=False, unlocked_only=True),
    CancelSweep(id="a"),
    Pause(),
    Resume(),
    Acknowledge(),
    Ping(want_hello=True),
]
SCHEMAS = {3: "dc44c0fc8b8bce37"}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message):
    assert wire.decode_message(wire.encode(message)) == message


WIDE = "\U0001f600"  # four bytes, the most that a character takes


def test_the_largest_backlog_is_one_message_below_the_limit():
    """What waits in the engine is sent at once: 1024 findings, each with the longest names and numbers."""
    name, number, word = WIDE * LABEL_LENGTH, 2**63 - 1, f"{2**64 - 1:#x}"
    row = Violation(
        phase=max(Phase, key=len), reason=max(Reason, key=len), group=name, part=max(Part, key=len),
        step=number, event=number, slot=number, position=number, request=request_name(WIDE * 5000),
        expected=word, actual=word, lag_steps=number, time_ns=number, sweep_id=name, slots=number,
        redetection=True,
    )  # fmt: skip
    who = Identity(engine=name, instance=name, rank=RANKS - 1, started_ns=number, pid=number, device=name)
    message = Violations(identity=who, rows=(row,) * BACKLOG)
    frame = wire.encode(message)
    check_message(wire.decode_message(frame), None)
    assert 3 << 20 < len(frame) < wire.MAX_MESSAGE_BYTES  # 3.4 MB


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_round_trip(command):
    assert wire.decode_command(wire.encode(command)) == command


def test_another_protocol_version_is_refused_with_both_numbers():
    frame = bytearray(wire.encode(Ping()))
    frame[3] = 99
    with pytest.raises(WireError, match=f"protocol version 99, this side speaks {wire.PROTOCOL_VERSION}"):
        wire.decode_command(bytes(frame))


def test_frames_of_protocol_version_1_are_refused():
    frame = bytearray(wire.encode(Ping()))
    frame[3] = 1
    with pytest.raises(WireError, match=f"protocol version 1, this side speaks {wire.PROTOCOL_VERSION}"):
        wire.decode_command(bytes(frame))


def test_a_changed_schema_has_a_new_version():
    """Both sides refuse unknown fields, so two schemas must not share a version.

    When this fails, raise PROTOCOL_VERSION unless it was raised since the last release, then update SCHEMAS.
    """
    _, parts = msgspec.json.schema_components([EngineMessage, Command])
    digest = hashlib.sha256(msgspec.json.encode(_undescribed(parts), order="sorted")).hexdigest()[:16]
    assert {wire.PROTOCOL_VERSION: digest} == SCHEMAS


def _undescribed(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _undescribed(part) for name, part in schema.items() if name != "description"}
    return [_undescribed(part) for part in schema] if isinstance(schema, list) else schema


def test_an_oversized_message_is_refused_on_both_sides(monkeypatch):
    frame = wire.encode(MESSAGES[1])
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(frame) - 1)
    with pytest.raises(WireError, match="over the limit"):
        wire.encode(MESSAGES[1])
    with pytest.raises(WireError, match="over the limit"):
        wire.decode_message(frame)


def test_a_command_is_not_a_message():
    with pytest.raises(WireError, match="does not fit the schema"):
        wire.decode_message(wire.encode(Ping()))


def test_an_unknown_field_is_refused():
    body = msgspec.msgpack.encode({"type": "ping", "want_hello": True, "more": 1})
    with pytest.raises(WireError, match="unknown field"):
        wire.decode_command(wire._HEADER + body)


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(garbage):
    for frame in (garbage, wire._HEADER + garbage):
        with pytest.raises(WireError):
            wire.decode_message(frame)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_flipped_byte_decodes_or_is_a_wire_error(place, value):
    frame = bytearray(wire.encode(MESSAGES[1]))
    frame[place % len(frame)] = value
    try:
        decoded = wire.decode_message(bytes(frame))
    except WireError:
        return
    assert type(decoded) is type(MESSAGES[1])


def test_deep_nesting_and_bad_utf8_are_wire_errors():
    for body in (b"\x91" * 100_000, b"\x81\xa4type\xa4\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            wire.decode_message(wire._HEADER + body)


def test_an_integer_that_msgpack_cannot_hold_is_a_wire_error():
    with pytest.raises(WireError, match="cannot be encoded"):
        wire.encode(snapshot(ME, 1, messages_dropped=1 << 70))


def test_errors_do_not_quote_the_content():
    body = msgspec.msgpack.encode({"type": "start_sweep", "id": ["a secret prompt"]})
    with pytest.raises(WireError) as caught:
        wire.decode_command(wire._HEADER + body)
    assert "secret" not in str(caught.value)
