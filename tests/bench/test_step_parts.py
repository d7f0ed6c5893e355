"""What `python -m tests.gpu.step_parts` makes of the steps that it has timed."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.gpu.step_parts import CANARY, Side


def test_a_block_has_medians_and_the_hooks_share_of_its_own_steps() -> None:
    side = Side()
    side.add([
        (0.004, {"schedule": 0.001, CANARY + "view": 0.0003, CANARY + "end of the step": 0.0001}),
        (0.002, {"schedule": 0.002, CANARY + "view": 0.0001}),
        (0.003, {"schedule": 0.003, CANARY + "view": 0.0002, CANARY + "end of the step": 0.0001}),
    ])  # fmt: skip
    side.add([(0.001, {"schedule": 0.0005})])
    assert side.step_us == [3000.0, 1000.0]
    assert side.parts_us == [
        {"schedule": 2000.0, CANARY + "view": 200.0, CANARY + "end of the step": 100.0},
        {"schedule": 500.0},
    ]
    assert side.canary_share == pytest.approx([0.1, 0.0])


def test_steps_of_a_load_that_changes_have_means() -> None:
    side = Side()
    side.add([(0.001, {"schedule": 0.0004}), (0.005, {CANARY + "view": 0.0006})], fmean)
    assert side.step_us == [3000.0]
    assert side.parts_us == [{"schedule": 200.0, CANARY + "view": 300.0}]
    assert side.canary_share == pytest.approx([0.1])
