from __future__ import annotations

import time

import pytest

from canary_obs.runtime.device.delayed_device_host import Sample
from canary_obs.runtime.report.counter_age import STALE_SECONDS, STALE_STEPS, CounterAge
from canary_obs.runtime.run_state import RunState
from canary_obs.vocabulary import State


class Reader:
    sample: Sample | None = None


@pytest.mark.parametrize(("age", "steps", "stale"), [(5.1, 36, True), (4.9, 36, False), (5.1, 35, False)])
@pytest.mark.parametrize("arrived", [True, False])
def test_old_for_too_long_and_for_too_many_forwards(
    monkeypatch: pytest.MonkeyPatch, arrived: bool, age: float, steps: int, stale: bool
) -> None:
    assert (STALE_SECONDS, STALE_STEPS) == (5.0, 36)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + age)
    reader = Reader()
    if arrived:
        reader.sample = Sample(sequence=3, step=10, pushed=100.0, words=None)  # type: ignore[arg-type]
    run = RunState(step=steps + 10 * arrived, ready_at=7.0 if arrived else 100.0, armed=True)
    found = CounterAge(reader, run).reasons()  # type: ignore[arg-type]
    text = f"the newest counters from the device are 5 s and {steps} forwards old"
    assert found == ([(State.BLIND, text)] if stale else [])
    run.armed = False
    assert CounterAge(reader, run).reasons() == []  # type: ignore[arg-type]
