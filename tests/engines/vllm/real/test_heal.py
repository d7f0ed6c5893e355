"""A share of the table of wrong answers, on one engine: `tests.engines.vllm.heal_table` has the whole one."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.heal.judge import MARGIN, judge
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
        judge(rig, requests, runs[0], runs[-1])
    row = {"policy": "off"} | round_of(*runs)
    assert passed(row), row
    assert row["wrong_delivered"] > 5
    assert row["listed_derived"] > 0
    assert row["damages_unknown"] == 0
    assert row["correct_listed"] < row["listed"]


def test_a_token_is_wrong_if_another_one_is_likelier(make_rig: Any) -> None:
    rig = make_rig(**ENGINE)
    requests = asks(4, 2)
    clean, other = serve(rig, requests, seed=None), serve(rig, requests, seed=None)
    judge(rig, requests, clean, other)
    assert all(answer.wrong_from is None and not answer.behind for answer in other.answers.values())
    changed = other.answers[requests[1].name]
    changed.tokens[2] = changed.tokens[2] % 1000 + 5
    judge(rig, requests, clean, other)
    assert [answer.wrong_from for answer in other.answers.values()].count(None) == 3
    assert changed.wrong_from == 2
    assert changed.behind[2] > MARGIN
    assert changed.behind[:2] == [0.0, 0.0]
