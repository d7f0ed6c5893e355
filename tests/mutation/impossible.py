"""Seeded defects of the check of messages whose values cannot be."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/hub/test_invalid_messages.py::"
_SNAPSHOT = _TESTS + "test_a_snapshot_that_cannot_be_is_refused"
_OTHER = _TESTS + "test_other_messages_that_cannot_be_are_refused"
_LOGGED = _TESTS + "test_refusals_are_logged_once_a_minute_and_cause_with_what_was_left_out"

CHECK = mutants(
    "canary_obs/hub/message_check.py",
    ("if not isfinite(value):", "if value != value:", _SNAPSHOT),
    ("if type(entry) is not int or entry < 0:", "if type(entry) is not int:", _SNAPSHOT),
    ("snapshot.sequence > previous.sequence:", "snapshot.sequence < 0:", _SNAPSHOT),
    (
        "snapshot.sequence > previous.sequence:",
        "True:",
        _TESTS + "test_a_restart_and_a_snapshot_that_was_overtaken_may_count_less",
    ),
    (
        " or type(before) is not int or count < before:",
        " or type(before) is not int:",
        _SNAPSHOT,
    ),
    ("    PerturbCount: _OUTCOMES,\n", "", _TESTS + "test_of_one_count_only_what_falls_is_refused"),
    ("snapshot = message.final if isinstance(message, Goodbye) else message", "snapshot = message", _OTHER),
    ("LABEL_LENGTH if name in _LABELS else TEXT_LENGTH", "TEXT_LENGTH", _OTHER),
)

RANKS = mutants(
    "canary_obs/hub/ranks.py",
    (
        "doubted = [State.DEGRADED] if self.refused is not None else []",
        "doubted: list[State] = []",
        _SNAPSHOT,
    ),
    (
        "return self.snapshot or self.lives.returned",
        "return self.snapshot",
        _TESTS + "test_a_process_that_comes_back_cannot_count_less_than_before",
    ),
    (
        "return self.lives.newest_of(started_ns)",
        "return None",
        _TESTS + "test_a_process_that_comes_back_cannot_count_less_than_before",
    ),
)

PROBLEMS = mutants(
    "canary_obs/hub/problems.py",
    ("if now - logged_at < LOG_SECONDS:", "if now < logged_at:", _LOGGED),
    ("{count - logged - 1} more", "{count - 1} more", _LOGGED),
)

ALL = CHECK + RANKS + PROBLEMS
