"""Every fault class is seen as announced, its engine is clean without it, and it changes what users get."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_cases.stage import broken, clean
from tests.fault_cases.table import collected, table

SPECIMENS = collected()


@pytest.mark.parametrize("name", SPECIMENS)
def test_fault(name: str) -> None:
    case = SPECIMENS[name]
    without = clean(case)
    assert without.violations == []
    found = broken(case)
    assert found.struck is not None
    assert found.finds == case.finds
    if case.missed:
        assert case.finds == ()
    else:
        assert found.latency == case.latency
    assert (found.differences(without) > 0) is not bool(case.harmless)


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "fault_cases.md"
    assert page.read_text(encoding="utf-8") == table(), (
        "run: python -m tests.fault_cases.table > docs/fault_cases.md"
    )
