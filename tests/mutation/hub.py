"""Defects of the hub: lives of a rank, clocks, acknowledgements, ranks that are missing."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_HUB = "tests/hub/test_hub.py::"
_AGE = "tests/runtime/report/test_counter_age.py::"
_HEALTH = "tests/runtime/test_health.py::"

LIVES = mutants(
    "canary_obs/hub/lives.py",
    (
        "for snapshot in self._ended.values():",
        "for snapshot in list(self._ended.values())[-1:]:",
        _HUB + "test_three_lives_are_summed_and_one_that_returns_counts_once",
    ),
    (
        "self._returned = self._ended.pop(started_ns, None)",
        "self._returned = self._ended.get(started_ns)",
        _HUB + "test_three_lives_are_summed_and_one_that_returns_counts_once",
    ),
    (
        "self._earlier = self._summed\n",
        "self._earlier = None\n",
        _HUB + "test_many_lives_are_bounded_and_none_is_lost",
    ),
)

COUNTERS = mutants(
    "canary_obs/hub/counters.py",
    (
        "return earlier if current is None else current",
        "return current",
        _HUB + "test_counters_that_one_life_does_not_report_stay",
    ),
)

CLOCKS = mutants(
    "canary_obs/hub/clocks.py",
    (
        "(snapshot.time_ns - wall_ns) / 1e9 + self.delay",
        "(snapshot.time_ns - wall_ns) / 1e9 - self.delay",
        _HUB + "test_an_old_snapshot_is_old_whatever_its_wall_clock_says",
    ),
    (
        "snapshot.boot_id is not None and snapshot.boot_id == self.boot_id",
        "snapshot.boot_id is not None",
        _HUB + "test_between_hosts_the_least_delay_counts_as_none",
    ),
    (
        "return passed - min(self._least, self._least_before)",
        "return 0.0",
        _HUB + "test_between_hosts_the_least_delay_counts_as_none",
    ),
)

RANKS = mutants(
    "canary_obs/hub/ranks.py",
    (
        "self.inherited += self._unacknowledged()",
        "self.inherited = self._unacknowledged()",
        _HUB + "test_a_violated_rank_that_restarts_stays_violated_until_acknowledged",
    ),
    (
        "found = violations_of(snapshot) - self.acknowledged_violations",
        "found = violations_of(snapshot)",
        _HUB + "test_a_restart_right_after_the_acknowledgement_is_not_violated",
    ),
    (
        "violations_of(snapshot) if later is None else self._seen(snapshot)",
        "violations_of(snapshot)",
        _HUB + "test_an_acknowledgement_covers_what_its_sender_saw",
    ),
)

TABLE = mutants(
    "canary_obs/hub/rank_table.py",
    (
        "for number in sorted(expected - {rank.identity.rank for rank in present}):",
        "for number in sorted(expected - set(range(len(present)))):",
        _HUB + "test_a_rank_that_was_never_heard_is_named",
    ),
    (
        "since = began if gone is None else max(began, gone.departed_at)",
        "since = began",
        _HUB + "test_a_rank_that_detached_while_the_others_go_on_is_missing",
    ),
)

INCIDENTS = mutants(
    "canary_obs/hub/incident_store.py",
    (
        "if up_to is not None and incident.newest_number > up_to:",
        "if up_to is not None and incident.newest_number < up_to:",
        _HUB + "test_an_acknowledgement_covers_what_its_sender_saw",
    ),
)

_SEEN = "tests/hub/test_acknowledgements.py::"

ACKNOWLEDGEMENTS = (
    *mutants(
        "canary_obs/hub/row_account.py",
        (
            "self._see(incident, rows - min(rows, later.get(incident, 0)))",
            "self._see(incident, rows)",
            _HUB + "test_an_acknowledgement_covers_what_its_sender_saw",
        ),
        (
            "rows[_OLDER] += rows.pop(oldest)",
            "rows.pop(oldest)",
            _SEEN + "test_rows_of_many_incidents_are_bounded_and_none_is_lost",
        ),
    ),
    *mutants(
        "canary_obs/hub/ranks.py",
        (
            "rows = self.rows.received - self.rows.unseen.total()",
            "rows = self.rows.received",
            _SEEN + "test_one_of_two_incidents_is_acknowledged_and_the_other_stays",
        ),
    ),
    *mutants(
        "canary_obs/hub/incidents.py",
        (
            "        self.acknowledged_ranks.discard(rank)\n",
            "",
            _SEEN + "test_by_rank_an_incident_is_acknowledged_once_all_of_its_ranks_are",
        ),
        (
            "self.ranks <= self.acknowledged_ranks",
            "bool(self.acknowledged_ranks)",
            _SEEN + "test_by_rank_an_incident_is_acknowledged_once_all_of_its_ranks_are",
        ),
    ),
    *mutants(
        "canary_obs/hub/acknowledgements.py",
        (
            "        if selection == EVERY_RANK:\n",
            "        if True:\n",
            _SEEN + "test_some_ranks_clear_no_fault_of_the_service",
        ),
    ),
    *mutants(
        "canary_obs/runtime/health.py",
        (
            "        if seen.violations_only:\n            return\n",
            "",
            _HEALTH + "test_the_acknowledgement_of_an_incident_covers_violations_only_and_can_be_undone",
        ),
    ),
)

REPORTED = mutants(
    "canary_obs/runtime/report/counter_age.py",
    (
        "age = time.monotonic() - (run.ready_at if newest is None else newest.pushed)",
        "age = 0.0 if newest is None else time.monotonic() - newest.pushed",
        _AGE + "test_old_for_too_long_and_for_too_many_forwards",
    ),
) + mutants(
    "canary_obs/runtime/health.py",
    (
        "return now if count is None else max(before, min(count, now))",
        "return now",
        _HEALTH + "test_an_acknowledgement_covers_what_its_sender_saw",
    ),
)

ALL = LIVES + COUNTERS + CLOCKS + RANKS + TABLE + INCIDENTS + ACKNOWLEDGEMENTS + REPORTED
