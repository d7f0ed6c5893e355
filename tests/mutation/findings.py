"""Seeded defects of findings and their redetections."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_SEEN = "tests/runtime/device/test_findings.py::"
_ROWS = "tests/runtime/device/test_violation_log.py::"
_STORY = "tests/runtime/test_findings.py::"
_HUB = "tests/hub/test_hub.py::"
_FLOOD = _ROWS + "test_a_flood_of_what_is_known_drops_nothing"
_FIRST = _ROWS + "test_damage_that_stays_is_one_finding_where_it_was_met_first"
_RUN = _ROWS + "test_consecutive_slots_of_a_request_are_one_finding"
_APART = _ROWS + "test_slots_of_no_request_and_of_other_places_are_findings_of_their_own"
_ONCE = _STORY + "test_damage_that_stays_is_sent_logged_and_counted_once"
_ONCE_MORE = _STORY + "test_a_slot_that_is_damaged_once_more_is_a_new_finding"
_LATER = _STORY + "test_a_service_that_starts_later_gets_what_is_not_acknowledged"
_STORED = _HUB + "test_a_row_that_is_sent_again_is_stored_once"
_OPEN = _HUB + "test_what_is_seen_again_keeps_its_incident_open_until_it_is_acknowledged"

FINDINGS = mutants(
    "canary_obs/runtime/device/findings.py",
    (
        "self._seen_at[finding] = now\n",
        "self._seen_at[finding] = seen_at or now\n",
        _SEEN + "test_what_stays_is_found_once",
    ),
    (
        "now - seen_at >= self._forget_seconds",
        "now - seen_at > self._forget_seconds",
        _SEEN + "test_what_comes_back_after_a_while_is_new",
    ),
)

ROWS = mutants(
    "canary_obs/runtime/device/violation_log.py",
    ("stamped.sort(key=itemgetter(0))", "pass", _FIRST),
    ("row[layout.ROW_EXPECTED], row[layout.ROW_ACTUAL]\n", "row[layout.ROW_EXPECTED], 0\n", _ONCE_MORE),
    ("repeated, lost = repeated + lost, 0", "pass", _FLOOD),
    ("(layout.ROW_REQUEST, layout.ROW_STEP)", "(layout.ROW_STEP,)", _RUN),
    ("violation.part is None and row[layout.ROW_REQUEST] >= 0", "violation.part is None", _APART),
)

READER = mutants(
    "canary_obs/runtime/device/counter_reader.py",
    ("(unread if overdue else 0)", "0", _STORY + "test_rows_that_never_come_count_as_findings"),
)

DELIVERY = mutants(
    "canary_obs/runtime/delivery.py",
    ("for violation in found if not violation.redetection]", "for violation in found]", _ONCE),
)

REPORTER = mutants(
    "canary_obs/runtime/report/reporter.py",
    ("        self._findings.extend(found)\n", "", _LATER),
    ("        self._findings.clear()\n", "        pass\n", _LATER),
)

RANKS = mutants(
    "canary_obs/hub/row_account.py",
    ("            if key not in self._known:\n", "            if True:\n", _STORED),
) + mutants(
    "canary_obs/hub/ranks.py",
    (
        "self.rows, self.acknowledged_violations = RowAccount(), 0",
        "self.acknowledged_violations = 0",
        _STORED,
    ),
)

HUB = mutants(
    "canary_obs/hub/hub.py",
    ("redetections_of(message) > redetections_of(rank.snapshot)", "False", _OPEN),
)

ALL = FINDINGS + ROWS + READER + DELIVERY + REPORTER + RANKS + HUB
