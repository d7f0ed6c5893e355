"""What the comparison of both canaries on a GPU calls wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.sglang_differential import add_outcome

_SOUND: dict[str, Any] = {
    "before": 0, "faults": 0, "theirs": [("verify_position", "full")], "ours": [("position", "full")],
    "unnamed": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, None),
        ({"theirs": []}, None),
        ({"ours": []}, "ours is silent"),
        ({"unnamed": [7]}, "ours is silent"),
        ({"before": 1}, "before the fault"),
        ({"faults": 1}, "before the fault"),
        (None, "not planted"),
        ("unseen", "not planted"),
    ],
)
def test_each_engine_is_held_to_it(change: Any, wrong: str | None) -> None:
    unseen = {"before": 0}
    outcome = None if change is None else unseen if change == "unseen" else _SOUND | change
    figures: dict[str, Any] = {"outcomes": [], "wrong": []}
    fault = SimpleNamespace(name="a fault", same_slots=True)
    add_outcome(figures, fault, {"as_shipped": _SOUND, "with_all": outcome})
    assert [wrong in line and "with_all" in line for line in figures["wrong"]] == [True] * (wrong is not None)
    assert figures["outcomes"] == [{"fault": "a fault", "as_shipped": _SOUND, "with_all": outcome}]
