"""Defects of fault injection: what is injected, what explains it, and what is said of it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_INJECTOR = "tests/runtime/perturb/test_injector.py::"
_MATCH = _INJECTOR + "test_only_a_violation_that_the_injection_explains_matches"
_MISSED = _INJECTOR + "test_without_checks_injections_are_missed"
_GROUP = _INJECTOR + "test_a_group_that_is_unknown_or_not_named_is_refused"
_SKIPPED = _INJECTOR + "test_what_was_drawn_and_cannot_be_made_is_skipped"
_FAILED = _INJECTOR + "test_a_table_entry_is_right_again_after_a_forward_that_failed"
_FOUND = _INJECTOR + "test_a_swap_of_tokens_is_found_at_both_slots_and_in_no_bytes"
_NEEDS = _INJECTOR + "test_a_swap_of_tokens_needs_tokens_to_compare_with"
_LOG = "tests/runtime/perturb/test_injection_log.py::"
_SWAPS = "tests/runtime/perturb/test_token_swaps.py::"
_LIMIT = "tests/runtime/test_line_limit.py::test_lines_beyond_the_limit_are_left_out_and_counted"

ALL = (
    *mutants(
        "canary_obs/runtime/perturb/injection.py",
        ("            and violation.step >= self.step\n", "", _MATCH),
        ("            and (place == (self.group, self.slot) or place in self.also)\n", "", _MATCH),
        (
            "violation.reason is Reason.CHAIN and violation.position in self.following",
            "violation.reason is Reason.CHAIN",
            _LOG + "test_what_a_swap_of_tokens_explains",
        ),
        (
            "0 <= position - first < forwards",
            "0 <= position - first",
            _LOG + "test_what_a_swap_of_tokens_explains",
        ),
        (
            "Reason.TOKEN, Reason.WRITE_TOKEN})\n_TOKENS",
            "Reason.TOKEN})\n_TOKENS",
            _LOG + "test_bytes_explain_bytes_and_links_links",
        ),
    ),
    *mutants(
        "canary_obs/runtime/perturb/injection_log.py",
        ("violation.step - injection.step", "violation.step - injection.step + 1", _MATCH),
        (
            "if injection.detected_by(row)",
            "if injection.explains(row)",
            _LOG + "test_what_was_left_behind_detects_nothing",
        ),
        (
            "self._limits[mode, why].next_line()",
            'self._limits[mode, ""].next_line()',
            _LOG + "test_skips_are_counted_by_reason_and_each_reason_has_a_line",
        ),
    ),
    *mutants(
        "canary_obs/runtime/perturb/flips.py",
        (
            "if injection.mode is PerturbMode.REAL_KV_USED:",
            "if injection.mode is not PerturbMode.REAL_KV_USED:",
            _MISSED,
        ),
    ),
    *mutants(
        "canary_obs/runtime/perturb/token_swaps.py",
        ("            view.input_ids[one.place] = other.token\n", "            pass\n", _FOUND),
        (
            "if other.token != first.token]",
            "if other is not first]",
            _SWAPS + "test_why_nothing_is_exchanged",
        ),
        (
            "            if swap.records is None:\n                self._close(",
            "            if True:\n                self._close(",
            _SWAPS + "test_a_forward_that_ended_is_not_abandoned",
        ),
        (
            "            if not swap.read:\n                self._close(swap, Outcome.MASKED, _UNREAD)\n"
            "        self._swaps.clear()",
            "            self._close(swap, Outcome.MASKED, _UNREAD)\n        self._swaps.clear()",
            _SWAPS + "test_what_is_open_at_the_end_is_masked_only_if_nothing_read_it",
        ),
        (
            "for one, then, record in now if record == then]",
            "for one, then, record in now]",
            _SWAPS + "test_what_another_request_wrote_over_it_and_reads_is_no_read_of_it",
        ),
    ),
    *mutants(
        "canary_obs/runtime/perturb/injector.py",
        ("if not name and len(state.groups) == 1:", "if not name:", _GROUP),
        ("        self._entries.abandon()  # of a forward that failed\n", "", _FAILED),
        (
            "            self.injections.skip(mode, self._target.name, step, why)\n",
            "            pass\n",
            _SKIPPED,
        ),
        ("or types.expected_ids is not None:", "or True:", _NEEDS),
    ),
    *mutants(
        "canary_obs/runtime/line_limit.py",
        ("            self._left_out += 1\n", "", _LIMIT),
        ("if now - self._began >= self._seconds:", "if now - self._began > self._seconds:", _LIMIT),
    ),
)
