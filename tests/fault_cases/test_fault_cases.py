"""Every fault class is seen as announced, its engine is clean without it, and it changes what users get."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_cases.stage import broken, clean
from tests.fault_cases.table import collected, table

SPECIMENS = collected()


@pytest.mark.parametrize("name", SPECIMENS)
def test_fault(name: str) -> None:
    specimen = SPECIMENS[name]
    without = clean(specimen)
    assert without.violations == []
    found = broken(specimen)
    assert found.struck is not None
    assert found.finds == specimen.finds
    if specimen.missed:
        assert specimen.finds == ()
    else:
        assert found.latency == specimen.latency
    assert (found.differences(without) > 0) is not bool(specimen.harmless)


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "fault_cases.md"
    assert page.read_text(encoding="utf-8") == table(), (
        "run: python -m tests.fault_cases.table > docs/fault_cases.md"
    )
