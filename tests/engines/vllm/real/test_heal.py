"""A share of the table of wrong answers, on one engine: `tests.engines.vllm.heal_table` has the whole one."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.heal.program import ENGINE
from tests.engines.vllm.heal.requests import asks
from tests.engines.vllm.heal.serve import serve
from tests.engines.vllm.heal.table import passed, round_of


def test_every_wrong_answer_is_listed(make_rig: Any) -> None:
    rig = make_rig(canary={"lane_rows": "1024"}, **ENGINE)
    requests, runs = asks(40, 1), []
    for faults in (None, None, 1):
        runs.append(serve(rig, requests, seed=faults))
        rig.fresh()
    row = {"policy": "off"} | round_of(*runs)
    assert passed(row), row
    assert row["wrong_delivered"] > 5
    assert row["listed_derived"] > 0
    assert row["damages_unknown"] == 0
    assert row["correct_listed"] < row["listed"]
