"""Defects of operators' sweeps: scopes, windows, deadlines, pause, and what outlives the service."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_CONTROL = "tests/hub/test_sweep_control.py::"
_SWEEPER = "tests/runtime/sweep/test_sweeper.py::"

ALL = (
    *mutants(
        "canary_obs/hub/sweep_control.py",
        (
            "entry.ranks[key] = RankEntry(\n                started_ns=0,",
            "RankEntry(\n                started_ns=0,",
            _CONTROL + "test_ranks_that_cannot_be_asked_fail_their_part",
        ),
        (
            " - (self._wall_ns() - entry.begun_ns) / 1e9",
            "",
            _CONTROL + "test_a_running_sweep_goes_on_after_a_restart_of_the_service",
        ),
        (
            "window.contains(wall_ns) and not entry.paused",
            "window.contains(wall_ns)",
            _CONTROL + "test_a_sweep_that_waits_can_be_held_and_cancelled",
        ),
        (
            "elif window is not None and not window.contains(wall_ns):",
            "elif False:",
            _CONTROL + "test_a_sweep_waits_for_its_window_and_ends_with_it",
        ),
    ),
    *mutants(
        "canary_obs/hub/sweep_entry.py",
        (
            "if moved or progress.paused:",
            "if moved:",
            _CONTROL + "test_one_sweep_is_paused_resumed_and_does_not_time_out",
        ),
        (
            "max(known) if known and len(known) == len(etas) else None",
            "max(known) if known else None",
            _CONTROL + "test_the_remaining_time_of_a_rank_that_does_not_report_is_unknown",
        ),
    ),
    *mutants(
        "canary_obs/runtime/sweep/walk.py",
        (
            "            command.data\n            and set",
            "            set",
            _SWEEPER + "test_a_sweep_of_a_part_checks_that_part_and_resets_no_age",
        ),
        (
            "chosen &= ~self._among(group, slots, unused)",
            "pass",
            _SWEEPER + "test_a_sweep_of_a_part_checks_that_part_and_resets_no_age",
        ),
        (
            "chosen &= slots <= command.last_slot",
            "pass",
            _SWEEPER + "test_damage_outside_a_range_is_not_met_and_inside_it_is",
        ),
    ),
    *mutants(
        "canary_obs/runtime/sweep/sweeper.py",
        (
            "self._held = sweep_id if paused else None",
            "self._held = None",
            _SWEEPER + "test_a_sweep_is_held_until_it_is_resumed",
        ),
    ),
    *mutants(
        "canary_obs/service/state_file.py",
        (
            "        new.replace(self._path)\n",
            "",
            "tests/service/test_state_file.py::test_a_sweep_is_there_after_a_restart",
        ),
    ),
)
