"""What attention is given is what the canary verifies: models beyond those of test_accounts.py, V1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.real import stale
from tests.engines.vllm.real.rig import LATENT
from tests.unchecked import Report


def check_tables(found: dict[str, dict[str, Any]], groups: set[str]) -> None:
    assert found["copied"] == {"reasons": [], "groups": [], "state": "ok", "why": []}
    for name in ("exchanged", "stale", "shifted"):
        assert found[name]["state"] == "violated", name
        assert set(found[name]["reasons"]) & {"chain", "position", "token", "unwritten"}, name
        assert set(found[name]["groups"]) == groups, name
    assert "token" in found["exchanged"]["reasons"]


def report_tables(engine: str, found: dict[str, dict[str, Any]], unchecked: Report) -> None:
    assert len(found) == 2
    for way, seen in found.items():
        unchecked(
            way, engine, (seen["state"], seen["reasons"]), names=stale.NOT_COMPARED, seconds=seen["seconds"]
        )


@pytest.mark.parametrize(("model", "groups"), [("gemma3", {"full", "swa", "swa2"}), ("deepseek", {"full"})])
def test_tables_that_are_not_the_runners(make_rig: Any, model: str, groups: set[str]) -> None:
    """Several groups; and tables in two parts, of decodes and of prefills."""
    rig = make_rig(model, **LATENT if model == "deepseek" else {})
    check_tables(stale.tried(rig), groups)
