"""Every fault class at the settings of production shows what production.json and docs/fault_cases.md say."""

from __future__ import annotations

import json

import pytest

from tests.fault_cases.production import observe
from tests.fault_cases.table import PRODUCTION, collected

CASES = collected()
COMMITTED = json.loads(PRODUCTION.read_text(encoding="utf-8"))
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_fault_at_production_defaults(name: str) -> None:
    assert observe(CASES[name]) == COMMITTED[name], "run: python -m tests.fault_cases.production"
