"""Defects of what a bench is judged by."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_COMPARISON = "tests/bench/test_comparison.py::"
_FIGURES = "tests/bench/test_load_figures.py::"
_STEPS = "tests/bench/test_step_log.py::"

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
    *mutants(
        "canary_obs/bench/load_figures.py",
        (
            "every = [value for column in columns for value in column]",
            "every = columns[-1]",
            _FIGURES + "test_host_time_is_judged_over_all_steps_of_all_rounds",
        ),
        (
            "noise = max(round((high - low) / 2, 5), round(abs(control - 1), 5))",
            "noise = round((high - low) / 2, 5)",
            _FIGURES + "test_what_equal_engines_differ_by_is_noise",
        ),
    ),
    *mutants(
        "canary_obs/bench/statistics.py",
        (
            "return statistics.median(log for _, log in pairs)",
            "return statistics.fmean(log for _, log in pairs)",
            _FIGURES + "test_the_ratio_is_one_of_medians_with_the_spread_of_its_pairs",
        ),
        (
            "math.ceil(share * len(ordered))",
            "int(share * len(ordered))",
            _FIGURES + "test_a_rank_is_not_exceeded_by_its_share",
        ),
    ),
    *mutants(
        "canary_obs/bench/kernel_clock.py",
        (
            "spent - self._spent.get(hook, 0.0) for",
            "spent for",
            "tests/bench/test_kernel_clock.py::test_kernels_are_taken_from_the_hook_that_calls_them",
        ),
        (
            "round(spent - kernels, 1)",
            "round(spent, 1)",
            "tests/bench/test_kernel_clock.py::test_all_hooks_together_leave_the_kernels_out",
        ),
    ),
    *mutants(
        "canary_obs/bench/vllm_load.py",
        ("longest + _END_SECONDS", "longest", "tests/bench/test_vllm_load.py::test_rounds_end_in_time"),
    ),
    *mutants(
        "canary_obs/bench/step_log.py",
        (
            "_ in self.steps if given]",
            "_ in self.steps]",
            _STEPS + "test_a_reader_waits_from_one_token_to_the_next_through_steps_without",
        ),
        ("dict(self._clocks())", "self._clocks()", _STEPS + "test_each_step_is_what_its_sums_added"),
    ),
)
