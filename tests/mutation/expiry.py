"""Seeded defects of the expiry of ranks and of the limit of event streams."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_HUB = "tests/hub/test_hub.py::"
_HOUR = _HUB + "test_ranks_that_left_or_fell_silent_are_forgotten_after_an_hour"

TABLE = mutants(
    "canary_obs/hub/rank_table.py",
    ("is not State.VIOLATED\n", "is State.BLIND\n", _HOUR),
    (
        "[0] is not State.VIOLATED\n",
        "[0] is not None\n",
        _HUB + "test_a_violated_rank_is_forgotten_once_it_is_acknowledged",
    ),
    (
        "now - rank.last_message < self._kept_seconds or",
        "now - rank.snapshot_received < self._kept_seconds or",
        _HUB + "test_a_rank_in_a_step_of_hours_is_not_forgotten",
    ),
)

DRILLS = mutants("canary_obs/hub/drills.py", ("self._counts.pop(key, None)", "pass", _HOUR))

STREAMS = mutants(
    "canary_obs/service/routes/events.py",
    (
        "        event_stream.open_streams += 1\n",
        "",
        "tests/service/test_events.py::test_streams_that_begin_at_once_are_counted_before_their_first_frame",
    ),
)

PAGES = mutants(
    "canary_obs/telemetry/exposition.py",
    (
        "self._cache = cache",
        "self._cache = self._cache | cache",
        "tests/telemetry/test_many_ranks.py::test_once_all_ranks_are_dead_the_page_is_that_of_an_empty_service",
    ),
)

ALL = TABLE + DRILLS + STREAMS + PAGES
