"""Results of benches as text, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canary_obs.bench.result import BenchResult
from canary_obs.cli.bench_report import (
    exit_with,
    print_json_and_table,
    print_kernels,
    print_result,
    write_json,
)

RESULT = BenchResult(title="a bench", figures={"overhead": 0.01, "by_budget": {"1%": 2.0}})


def exit_code(**faults: object) -> object:
    with pytest.raises(SystemExit) as ended:
        exit_with(BenchResult(title="a bench", figures={}, faults=faults))
    return ended.value.code


def test_figures_of_a_canary_that_failed_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(violations=0, observer_faults={}, waits=None) == 0
    assert capsys.readouterr().err == ""
    assert exit_code(violations=0, observer_faults={"head": 8}) == 1
    assert "observer_faults = {'head': 8}" in capsys.readouterr().err


def test_a_table_or_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, as_json=True)
    assert json.loads(capsys.readouterr().out) == RESULT.figures
    print_result(RESULT, as_json=False)
    table = capsys.readouterr().out
    assert "a bench" in table
    assert "overhead" in table


def test_table_json_line_and_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "figures.json"
    print_json_and_table(RESULT, output)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(output.read_text()) == RESULT.figures
    assert "overhead" in printed.err
    write_json(None, RESULT.figures)


def test_kernel_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"work": "copy", "us": 1.5, "tb_s": 3.0, "ratio": None, "limit": "", "met": None},
        {"work": "verify", "us": 17.25, "tb_s": None, "ratio": 0.5, "limit": "<= 17 us", "met": False},
    ]
    print_kernels(BenchResult(title="kernels", figures={"rows": rows}), as_json=False)
    table = capsys.readouterr().out
    for text in ("copy", "1.50", "3.000", "17.25", "0.500", "<= 17 us", "NO"):
        assert text in table
