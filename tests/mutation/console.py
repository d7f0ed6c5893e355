"""Defects of browser sessions and of the console."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_SESSIONS = "tests/service/test_sessions.py::"
_SENTENCE = "tests/service/incident/test_sentence.py::"
_FLEET = "tests/service/test_fleet.py::"

SESSIONS = mutants(
    "canary_obs/service/sessions.py",
    (
        "in_time = now < session.ends_at and",
        "in_time =",
        _SESSIONS + "test_it_ends_by_time_even_in_use",
    ),
    (
        "now - session.used_at <= IDLE_SECONDS",
        "True",
        _SESSIONS + "test_it_ends_when_unused",
    ),
    (
        "max(0, len(mine) - SESSIONS_PER_TOKEN + 1)",
        "max(0, len(mine) - SESSIONS_PER_TOKEN)",
        _SESSIONS + "test_the_number_of_a_tokens_sessions_is_bounded",
    ),
)

SIGN_IN = mutants(
    "canary_obs/service/sign_in.py",
    (
        "            self.limiter.add_failure(address)\n",
        "",
        _SESSIONS + "test_attempts_are_limited_by_address",
    ),
    (
        "        if caller is None:\n            self.sessions.close(session)\n            return None\n",
        "        caller = caller or Caller(name=None, scopes=frozenset(TokenScope))\n",
        _SESSIONS + "test_it_ends_with_its_token",
    ),
    (
        "if not permits(caller.scopes, TokenScope.READ):",
        "if False:",
        _SESSIONS + "test_the_console_needs_the_scope_read",
    ),
)

AUTH = mutants(
    "canary_obs/service/auth.py",
    (
        'if scope["method"] not in _SAFE_METHODS and not signed_in.permits_write(headers):',
        "if False:",
        _SESSIONS + "test_a_session_writes_with_its_csrf_token_only",
    ),
    (
        "if tokens.empty or authorization is not None:",
        "if tokens.empty or tokens.authenticate(authorization or '') is not None:",
        _SESSIONS + "test_a_bearer_token_needs_no_csrf_token_and_wins_over_the_cookie",
    ),
)

FLEET = mutants(
    "canary_obs/service/fleet.py",
    (
        "ranks_ended=sum(rank.status not in waiting for rank in record.ranks),",
        "ranks_ended=len(record.ranks),",
        _FLEET + "test_a_sweeps_numbers_are_over_all_ranks",
    ),
    (
        "rows.sort(key=lambda row: (-_SEVERITY[row.state], -row.violations, row.key))",
        "rows.sort(key=lambda row: row.key)",
        _FLEET + "test_ranks_are_sorted_worst_first_with_their_reasons",
    ),
)

SENTENCE = mutants(
    "canary_obs/service/incident/facts.py",
    (
        "if evidence.prompted or evidence.step < row.step:",
        "if evidence.step < row.step:",
        _SENTENCE + "test_a_wrong_position_says_less_when_less_is_known",
    ),
    (
        "return any(event.step > row.step for event in evidence.history)",
        "return False",
        _SENTENCE + "test_a_wrong_position_says_less_when_less_is_known",
    ),
    (
        "return self.reader not in self.users and self.reader not in writers",
        "return self.reader not in self.users",
        _SENTENCE + "test_a_wrong_position_says_less_when_less_is_known",
    ),
    (
        "return users if self.reader is not None and self.reader not in users else ()",
        "return users",
        _SENTENCE + "test_a_wrong_position_says_less_when_less_is_known",
    ),
)

TIMELINE = mutants(
    "canary_obs/service/incident/timeline.py",
    (
        "covers = progress.data and row.group in progress.groups and progress.step <= row.step",
        "covers = True",
        "tests/service/incident/test_report.py::test_a_sweep_that_proves_nothing_is_no_last_good_check",
    ),
)

ALL = SENTENCE + TIMELINE + SESSIONS + SIGN_IN + AUTH + FLEET
