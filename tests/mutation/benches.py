"""Defects of what a bench is judged by."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_COMPARISON = "tests/bench/test_comparison.py::"

ALL = (
    *mutants(
        "canary_obs/bench/comparison.py",
        ("_committed(path) or path", "path", _COMPARISON + "test_a_result_is_not_compared_with_itself"),
        (
            ' and earlier["environment"]["time"] != own',
            "",
            _COMPARISON + "test_a_result_is_not_compared_with_itself",
        ),
        (
            "if abs(difference) > now.noise + before.noise:",
            "if abs(difference) > 2 * (now.noise + before.noise):",
            _COMPARISON + "test_what_got_worse_is_said_with_both_values_the_commit_and_the_goal",
        ),
    ),
    *mutants(
        "canary_obs/bench/result.py",
        (
            'if self.better == "lower" else than',
            "if self.goal is None else than",
            "tests/bench/test_result.py::test_a_goal_is_the_worst_value_that_is_good_enough",
        ),
    ),
    *mutants(
        "canary_obs/cli/bench_report.py",
        (
            "1 if result.failed or result.missed else 0",
            "1 if result.failed else 0",
            "tests/cli/test_bench_report.py::test_a_missed_goal_fails_though_the_canary_was_sound",
        ),
    ),
)
