"""What the engine's own log says of findings, at a bounded rate."""

from __future__ import annotations

import logging

import msgspec
import pytest

from canary_obs.records import Identity, Violation
from canary_obs.runtime.report.finding_log import FindingLog
from canary_obs.vocabulary import Part, Phase, Reason

IDENTITY = Identity(engine="vllm", instance="default", rank=0, started_ns=1, pid=2, device="cpu")
VIOLATION = Violation(
    phase=Phase.PATROL, reason=Reason.KV_DATA, group="full", part=Part.K, step=7, event=1, slot=33,
    position=1, request="r-1", expected="0x1", actual="0x2", lag_steps=0, time_ns=1, sweep_id=None,
)  # fmt: skip
INCIDENT = "20261124T020000Z-abcdef"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def of_slot(slot: int, **changes: object) -> Violation:
    return msgspec.structs.replace(VIOLATION, slot=slot, **changes)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    return [record.getMessage() for record in caplog.records]


def test_a_line_names_the_violation(caplog: pytest.LogCaptureFixture) -> None:
    FindingLog(IDENTITY).update([VIOLATION], INCIDENT)
    assert lines(caplog) == [
        "canary_obs: rank 0 of vllm/default: KV cache violation: reason=kv_data, phase=patrol, group=full, "
        "part=k, slot=33, position=1, request=r-1, step=7, expected=0x1, actual=0x2, "
        f"incident={INCIDENT}"
    ]


def test_a_flood_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = FindingLog(IDENTITY, clock)
    log.update([of_slot(slot) for slot in range(1000)], INCIDENT)
    assert len(lines(caplog)) == 10
    clock.now += 10.0
    log.update([of_slot(5000)], INCIDENT)
    assert lines(caplog)[-1].endswith(
        f"slot=5000, position=1, request=r-1, step=7, expected=0x1, actual=0x2, incident={INCIDENT} "
        "(990 more since the last line were left out)"
    )
    clock.now += 10.0
    log.update([of_slot(5001)], INCIDENT)
    assert "left out" not in lines(caplog)[-1]
