"""The table of unchecked ways in docs/architecture.md is what the tests recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import unchecked as ways

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table() -> None:
    page = ways.PAGE.read_text(encoding="utf-8")
    assert ways.page_with_table(page) == page, "run `python -m tests.unchecked`"


def test_every_record_is_made_by_a_test() -> None:
    for record in ways.recorded():
        path, *names = str(record["test"]).split(":")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {names[-1]}(" in source, record
        assert "unchecked" in source, record


def test_a_way_that_stays_ok_is_refused(unchecked: ways.Report) -> None:
    with pytest.raises(AssertionError, match="the state is 'ok'"):
        unchecked("nothing runs", "reference", ("ok", ()), names="", seconds=0.0)


@pytest.mark.parametrize(("names", "seconds"), [("another reason", 0.0), ("a reason", 10.1)])
def test_a_wrong_reason_or_a_late_one_is_refused(unchecked: ways.Report, names: str, seconds: float) -> None:
    with pytest.raises(AssertionError):
        unchecked("nothing runs", "reference", ("blind", ["a reason"]), names=names, seconds=seconds)


def test_a_report_must_agree_with_its_record(
    unchecked: ways.Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ways, "FOLDER", tmp_path)
    monkeypatch.setenv("UPDATE_UNCHECKED", "1")
    blind = ("blind", ["3 runs missing"])
    unchecked("nothing runs", "reference", blind, names="runs missing", seconds=0.26)
    (record,) = ways.recorded()
    assert record["seconds"] == 0.3
    assert "| nothing runs | reference | `blind` | runs missing | 0.3 |" in ways.table()
    monkeypatch.delenv("UPDATE_UNCHECKED")
    with pytest.raises(AssertionError):
        unchecked("nothing runs", "reference", ("degraded", blind[1]), names="runs missing", seconds=0)
    path = next(tmp_path.iterdir())
    path.write_text(json.dumps(record | {"state": "degraded"}), encoding="utf-8")
    with pytest.raises(AssertionError):
        unchecked("nothing runs", "reference", blind, names="runs missing", seconds=0)
