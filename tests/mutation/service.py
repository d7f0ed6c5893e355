"""Defects of scopes, tokens, rate limits, audit, the event stream and drills."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_POLICY = "tests/service/test_route_policy.py::"
_TOKENS = "tests/service/test_token_store.py::"
_WRITES = "tests/service/test_write_requests.py::"
_LIMITS = "tests/service/test_rate_limiter.py::"
_EVENTS = "tests/service/test_event_stream.py::"
_DRILL = "tests/runtime/perturb/test_drill.py::"

AUTH = mutants(
    "canary_obs/service/auth.py",
    (
        "if rule.scope is None or permits(caller.scopes, rule.scope):",
        "if rule.scope is None or caller.scopes:",
        _POLICY + "test_what_is_not_granted_is_refused_on_every_route_by_every_method",
    ),
    (
        "if rule is None or rule.scope is not None:",
        "if rule is not None and rule.scope is not None:",
        _POLICY + "test_a_route_outside_the_policy_is_not_served",
    ),
    (
        "if audited is None or caller is None:",
        "if audited is None or caller is None or refused:",
        _WRITES + "test_every_write_request_is_audited_with_its_caller_and_outcome",
    ),
    (
        "return None if safe else",
        "return None if True else",
        _WRITES + "test_a_method_that_a_path_does_not_have_is_a_refused_write_request",
    ),
    (
        'safe = scope["method"] in _SAFE_METHODS',
        "safe = False",
        _WRITES + "test_a_method_that_a_path_does_not_have_is_a_refused_write_request",
    ),
    (
        "token=caller.name,",
        "token=None,",
        _WRITES + "test_every_write_request_is_audited_with_its_caller_and_outcome",
    ),
    (
        "if seconds == 0:",
        "if seconds >= 0:",
        _WRITES + "test_too_many_write_requests_are_refused_and_reach_no_rank",
    ),
)

TOKENS = mutants(
    "canary_obs/service/token_store.py",
    (
        "DEFAULT_SCOPES = (TokenScope.READ, TokenScope.OPERATE)",
        "DEFAULT_SCOPES = tuple(TokenScope)",
        _TOKENS + "test_without_tokens_local_callers_read_and_operate_but_do_not_inject",
    ),
    (
        'found is not None and scheme.lower() == "bearer" else None',
        "found is not None else None",
        _TOKENS + "test_each_token_has_its_own_name_and_scopes",
    ),
)

LIMITS = mutants(
    "canary_obs/service/rate_limiter.py",
    (
        "self._interval * (per_minute - 1)",
        "self._interval * per_minute",
        _LIMITS + "test_a_minutes_worth_at_once_then_evenly_spaced",
    ),
    (
        "max(self._due.get(name, now), now) + self._interval",
        "self._due.get(name, now) + self._interval",
        _LIMITS + "test_unused_requests_do_not_accumulate_beyond_a_minute",
    ),
)

EVENT_STREAM = mutants(
    "canary_obs/service/event_stream.py",
    (
        "lost = self.last_number - number - len(kept)",
        "lost = 0",
        _EVENTS + "test_a_flood_of_violations_drops_no_other_events_and_counts_its_losses",
    ),
    (
        "self._publish(self._violations, EventKind.VIOLATION, event)",
        "self._publish(self._others, EventKind.VIOLATION, event)",
        _EVENTS + "test_a_flood_of_violations_drops_no_other_events_and_counts_its_losses",
    ),
    (
        "if event.number <= number:",
        "if event.number < number:",
        _EVENTS + "test_a_flood_of_violations_drops_no_other_events_and_counts_its_losses",
    ),
)

DRILL = mutants(
    "canary_obs/runtime/perturb/drill.py",
    (
        "target.bitwise_xor_(_BIT)",
        "target.bitwise_xor_(0)",
        _DRILL + "test_an_injected_fault_is_detected_restored_and_no_violation[llama]",
    ),
    (
        "if self._injected is not None and not self._checked:",
        "if self._injected is not None and self._checked:",
        _DRILL + "test_detach_gives_the_scratch_slot_back",
    ),
    (
        "if any(row.phase is not Phase.PATROL for row in seen):",
        "if not seen:",
        _DRILL + "test_a_false_alarm_is_a_missed_drill",
    ),
)

DRILL_STORE = mutants(
    "canary_obs/hub/drills.py",
    (
        "drill.expected is not None and drill.expected <= drill.findings.keys()",
        "drill.expected is not None",
        "tests/hub/test_drills.py::test_a_drill_finishes_with_its_last_report",
    ),
    (
        "if now < self._running.deadline:",
        "if now < 0:",
        "tests/hub/test_drills.py::test_one_drill_at_a_time_until_its_deadline",
    ),
)

_ADMISSION = "tests/transport/test_admission.py::"
_WRONG_KEYS = _ADMISSION + "test_an_engine_with_wrong_keys_is_refused_and_delays_no_other[unknown_key]"

ADMISSION = mutants(
    "canary_obs/transport/admission.py",
    ("admitted = self._keys is not None and self._keys.engines.admits(key)", "admitted = valid", _WRONG_KEYS),
    (
        '_ADMITTED, _REFUSED = b"200", b"300"',
        '_ADMITTED, _REFUSED = b"200", b"400"',
        _ADMISSION + "test_an_engine_is_admitted_once_its_key_is_listed",
    ),
    ("            self._count(HandshakeCause.UNKNOWN_KEY, peer)", "            pass", _WRONG_KEYS),
)

ENDPOINT = mutants(
    "canary_obs/transport/endpoint.py",
    (
        "(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS),",
        "(zmq.HEARTBEAT_IVL, 0.0),",
        _ADMISSION + "test_both_sides_detect_a_silent_connection_loss",
    ),
    (
        'if not keyed and not is_loopback(host.strip("[]")):',
        "if False:",
        "tests/transport/test_links.py::test_bad_endpoints_are_refused_with_rule_and_remedy",
    ),
)

LISTENER = mutants(
    "canary_obs/transport/listener.py",
    (
        "            self._drain()",
        "            pass",
        "tests/transport/test_links.py::test_messages_that_arrived_before_close_are_delivered",
    ),
)

KEYS = mutants(
    "canary_obs/transport/keys.py",
    (
        "if version != self._version:",
        "if False:",
        _ADMISSION + "test_a_removed_key_admits_no_new_connection",
    ),
    (
        "if secret and mode & (stat.S_IRWXO | stat.S_IWGRP):",
        "if secret and mode & (stat.S_IWOTH | stat.S_IWGRP):",
        "tests/transport/test_keys.py::test_a_secret_key_that_others_may_read_or_write_is_refused",
    ),
    (
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC",
        "os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC",
        "tests/transport/test_keys.py::test_existing_keys_are_never_overwritten_and_no_new_file_is_left",
    ),
)

QUERY = mutants(
    "canary_obs/service/query_parameters.py",
    (
        "if count > 1",
        "if count > 2",
        "tests/service/test_query_parameters.py::test_a_parameter_that_is_given_twice_is_refused",
    ),
    (
        "    if unknown:\n",
        "    if False:\n",
        "tests/service/test_query_parameters.py::"
        "test_what_changes_something_refuses_parameters_that_it_does_not_have",
    ),
)

ALL = (
    QUERY
    + AUTH
    + TOKENS
    + LIMITS
    + EVENT_STREAM
    + DRILL
    + DRILL_STORE
    + ADMISSION
    + ENDPOINT
    + LISTENER
    + KEYS
)
