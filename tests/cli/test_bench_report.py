"""Results of benches as text, JSON and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from canary_obs.bench.result import BenchResult, Measure
from canary_obs.cli.bench_report import (
    exit_with,
    print_json_and_table,
    print_kernels,
    print_result,
    write_json,
)

RESULT = BenchResult(
    bench="demo", title="a bench", plan={}, figures={"overhead": 0.01, "by_budget": {"1%": 2.0}}
)


def exit_code(result: BenchResult, baseline: Path | None = None) -> object:
    with pytest.raises(SystemExit) as ended:
        exit_with(result, baseline)
    return ended.value.code


def with_faults(**faults: object) -> BenchResult:
    return replace(RESULT, faults=faults)


def test_figures_of_a_canary_that_failed_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(with_faults(violations=0, observer_faults={}, waits=None)) == 0
    assert "count" not in capsys.readouterr().err
    assert exit_code(with_faults(violations=0, observer_faults={"head": 8})) == 1
    assert "observer_faults = {'head': 8}" in capsys.readouterr().err


def test_a_missed_goal_fails_though_the_canary_was_sound(capsys: pytest.CaptureFixture[str]) -> None:
    measures = {
        "decode": Measure(value=0.01, goal=0.005),
        "sweep": Measure(value=0.98, better="higher", goal=0.97),
    }
    assert exit_code(replace(RESULT, measures=measures)) == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["goal missed: decode is 0.01, must be at most 0.005"]


def test_what_got_worse_is_said_and_what_was_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(replace(RESULT, measures={"decode": Measure(value=2.0)})) == 0
    assert capsys.readouterr().err.startswith("not compared: no committed result has this bench")
    earlier = replace(RESULT, measures={"decode": Measure(value=1.0), "prefill": Measure(value=1.0)})
    write_json(tmp_path / "earlier.json", earlier.to_json())
    now = replace(RESULT, measures={"decode": Measure(value=2.0)})
    assert exit_code(now, tmp_path / "earlier.json") == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "compared with earlier.json: 1 figures, 1 worse"
    assert said[1].startswith("worse: decode: 1 at ")
    assert said[2] == "not measured any more: prefill"


def test_a_table_or_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, as_json=True)
    assert json.loads(capsys.readouterr().out) == RESULT.to_json()
    print_result(RESULT, as_json=False)
    table = capsys.readouterr().out
    assert "a bench" in table
    assert "overhead" in table


def test_table_json_line_and_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "figures.json"
    print_json_and_table(RESULT, output)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(output.read_text()) == RESULT.to_json()
    assert "overhead" in printed.err
    write_json(None, RESULT.figures)


def test_kernel_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"work": "copy", "us": 1.5, "tb_s": 3.0, "ratio": None},
        {"work": "verify", "us": 17.25, "tb_s": None, "ratio": 0.5},
    ]
    measures = {"copy": Measure(value=1.5), "verify": Measure(value=17.25, goal=17)}
    print_kernels(replace(RESULT, figures={"rows": rows}, measures=measures), as_json=False)
    table = capsys.readouterr().out
    for text in ("copy", "1.50", "3.000", "17.25", "0.500", "<= 17", "NO"):
        assert text in table
