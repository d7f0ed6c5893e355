"""Seeded defects of health, sweep schedule and long steps."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_SCHEDULE = "tests/runtime/sweep/test_schedule.py::"
_WATCH = "tests/runtime/report/test_step_watch.py::"
_HUB = "tests/hub/test_hub.py::"
_LOST = "tests/kernels/test_fingerprint.py::test_only_another_token_makes_equal_bytes_a_lost_write"
_HEALTH = "tests/runtime/test_health.py::"

SCHEDULE = mutants(
    "canary_obs/runtime/sweep/schedule.py",
    (
        "wait * 2**self._failures",
        "wait",
        _SCHEDULE + "test_failures_wait_twice_as_long_each_time_up_to_a_minute",
    ),
    (
        "now, None, 0\n",
        "now, None, self._failures\n",
        _SCHEDULE + "test_failures_wait_twice_as_long_each_time_up_to_a_minute",
    ),
    (
        "            self._not_before = now + wait\n",
        "            pass\n",
        _SCHEDULE + "test_a_cancelled_sweep_is_not_started_again_at_once_and_hides_no_failure",
    ),
    (
        "sweep_max_age_seconds / 2",
        "sweep_max_age_seconds",
        _SCHEDULE + "test_a_sweep_half_as_old_as_allowed_is_due_while_busy",
    ),
)

SWEEPER = mutants(
    "canary_obs/runtime/sweep/sweeper.py",
    (
        '                self.schedule.ended(SweepStatus.FAILED, f"{type(error).__name__}: {error}")\n',
        "                del error\n",
        _SCHEDULE + "test_a_failing_idle_sweep_backs_off_and_names_its_reason",
    ),
)

STEP_SCHEDULER = mutants(
    "canary_obs/runtime/step_scheduler.py",
    (
        "sweeper.running and (sweeper.ending or not (self._run.paused or sweeper.held))",
        "sweeper.running and not self._run.paused",
        _SCHEDULE + "test_a_sweep_cancelled_while_paused_ends",
    ),
    (
        "        self._begin_overdue_sweep()\n        if self._copy_wanted:",
        "        if self._copy_wanted:",
        _SCHEDULE + "test_an_engine_that_is_never_idle_sweeps_and_stays_ok",
    ),
    (
        "        if not run.paused and not sweeper.running:\n",
        "        if not sweeper.running:\n",
        _SCHEDULE + "test_no_sweep_starts_while_paused",
    ),
)

CANARY = mutants(
    "canary_obs/runtime/canary.py",
    (
        "        self._depth, self._head_done = 0, False\n",
        "        self._head_done = False\n",
        "tests/runtime/test_trust_gate.py::test_a_forward_that_is_never_closed",
    ),
    (
        "(self.sweeper.running and not run.paused)",
        "self.sweeper.running",
        _SCHEDULE + "test_a_paused_sweep_does_not_keep_an_idle_engine_awake",
    ),
)

STEP_WATCH = mutants(
    "canary_obs/runtime/report/step_watch.py",
    (
        "if progress != self._progress or",
        "if self._progress is None or",
        _WATCH + "test_an_engine_that_steps_is_not_in_one_long_step",
    ),
    (
        " or not self._in_step()",
        "",
        _WATCH + "test_silence_of_an_engine_without_a_step_is_not_excused",
    ),
    (
        "run.last_step_end, self._snapshots()",
        "run.last_step_end, 0",
        _WATCH + "test_an_engine_that_makes_snapshots_is_in_no_long_step",
    ),
)

RANKS = mutants(
    "canary_obs/hub/ranks.py",
    (
        "now + min(stale_seconds, limit_seconds - message.seconds)",
        "now + stale_seconds",
        _HUB + "test_a_step_that_does_not_end_is_blind",
    ),
    (
        "(silent > stale_seconds and now > self.step_excuses_until)",
        "silent > stale_seconds",
        _HUB + "test_a_sweep_outlasts_a_long_step",
    ),
    (
        "now + min(stale_seconds,",
        "now + min(2 * stale_seconds,",
        _HUB + "test_an_engine_killed_in_a_long_step_is_noticed_as_soon_as_any_other",
    ),
)

HEALTH = mutants(
    "canary_obs/runtime/health.py",
    (
        "PIPELINE_STALE_SECONDS + health_inputs.excused_seconds",
        "PIPELINE_STALE_SECONDS",
        _HEALTH + "test_counters_that_waited_for_a_long_step_are_not_stale",
    ),
)

RUN_STATE = mutants(
    "canary_obs/runtime/run_state.py",
    (
        "if now - self.long_step_end <= _SECONDS_TO_CATCH_UP else 0.0",
        "",
        _HEALTH + "test_a_long_step_excuses_until_its_copies_were_read",
    ),
)

WRITE = mutants(
    "kernels/canary_kernels/write/reference.py",
    (
        "replaced = ((old ^ identity) & TOKEN_MASK) != 0",
        "replaced = (old & TOKEN_MASK) >= 0",
        _LOST,
    ),
)

DEVICE_STATE = mutants(
    "canary_obs/runtime/device/state.py",
    (
        "        spare[layout.IDENTITY].fill_(_ADOPTED)  # an assignment would wait for the device\n",
        "",
        "tests/runtime/test_announcements.py::test_a_copy_from_nowhere_stores_no_garbage",
    ),
)

ALL = (
    *SCHEDULE, *SWEEPER, *STEP_SCHEDULER, *CANARY, *STEP_WATCH, *RANKS, *HEALTH, *RUN_STATE, *WRITE,
    *DEVICE_STATE,
)  # fmt: skip
