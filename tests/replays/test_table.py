"""The page of incident replays is current, and every replay is run on its engine."""

from __future__ import annotations

from pathlib import Path

from tests.replays.replay import ENGINES, collected, on
from tests.replays.table import table
from tests.replays.unread import UNREAD

_LISTED = 15


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "replays.md"
    assert page.read_text(encoding="utf-8") == table(), "run: python -m tests.replays.table > docs/replays.md"


def test_every_replay_has_an_engine_and_a_report_of_its_own() -> None:
    replays = collected()
    assert {replay.rig for replay in replays.values()} <= ENGINES.keys()
    assert sorted(on("vllm") + on("sglang")) == sorted(replays)
    reports = [replay.report for replay in replays.values()]
    assert len(set(reports)) == len(reports)
    assert not set(reports) & set(UNREAD)
    assert sum(replay.listed for replay in replays.values()) + len(UNREAD) == _LISTED
