"""Every fault class is seen as announced, its engine is clean without it, and it changes what users get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault_cases.engines import RUNS
from tests.fault_cases.stage import broken, clean
from tests.fault_cases.table import collected, table
from tests.sizes import sized

SPECIMENS = collected()
FIRSTS = {case.finds: name for name, case in reversed(SPECIMENS.items())}  # one of those that are found alike


@pytest.mark.parametrize("name", sized(list(SPECIMENS), sorted(FIRSTS.values())))
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


def test_every_run_on_an_engine_is_made_by_a_test() -> None:
    for run in RUNS:
        assert run.case in SPECIMENS, run
        path, name = run.test.split(":")
        source = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, run
    assert len(set(RUNS)) == len(RUNS)


def test_every_fault_that_is_planted_in_sglang_is_listed() -> None:
    path = "engines/sglang/real/test_faults.py"
    source = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
    listed = {run.test.split(":")[1] for run in RUNS if run.test.startswith(path)}
    assert set(re.findall(r"^def (test_\w+)", source, re.MULTILINE)) == listed


def test_every_fault_that_is_planted_in_vllm_is_listed() -> None:
    path = "engines/vllm/real/test_faults.py"
    source = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
    listed = {run.test.split(":")[1] for run in RUNS if run.test.startswith(path)}
    # Two pages in each other's place is a copy of two others: no class of its own.
    assert set(re.findall(r"^def (test_\w+)", source, re.MULTILINE)) == listed | {"test_two_blocks_swapped"}
