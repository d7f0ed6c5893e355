"""Seeded defects of the runtime, the transport and the hub."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_SWEEP = "tests/runtime/sweep/test_sweeper.py::"
_CLEAN = "tests/runtime/test_models.py::test_traffic_is_clean"
_SIGNALS = "tests/runtime/report/test_swa_divergence.py::test_the_three_signals"
_EARLY = "tests/runtime/report/test_swa_divergence.py::test_nothing_is_reported_too_early"
_AT_DETACH = "tests/runtime/report/test_swa_divergence.py::test_an_interval_of_0_reports_at_detach_only"
_TOKENS = "tests/runtime/report/test_swa_divergence.py::test_the_reported_tokens_are_those_of_the_device"
_WALKED = "tests/engines/vllm/test_window_tables.py::test_as_a_loop_over_every_token"
_HOST = "tests/runtime/device/test_delayed_device_host.py::"

SWEEP = mutants(
    "canary_obs/runtime/sweep/sweeper.py",
    (
        'elif seen["violations"]:',
        'elif seen["violations"] > 1:',
        _SWEEP + "test_one_flipped_bit_anywhere_is_caught_by_the_next_sweep",
    ),
    (
        "evicted = int((slots < 0).sum())",
        "evicted = int((slots < -1).sum())",
        _SWEEP + "test_slots_evicted_during_a_sweep_are_skipped_and_counted",
    ),
)

WALK = mutants(
    "canary_obs/runtime/sweep/walk.py",
    (
        "torch.where(cached, slots, -1)",
        "slots",
        _SWEEP + "test_slots_evicted_during_a_sweep_are_skipped_and_counted",
    ),
    (
        "torch.where(previous_cached, previous, -1)",
        "torch.where(previous_cached, -1, previous)",
        _SWEEP + "test_a_record_that_lost_its_link_is_found_without_reading_bytes",
    ),
)

DIVERGENCE = mutants(
    "canary_obs/runtime/report/swa_divergence.py",
    (
        "verified_swa=self._verified(tokens.windowed, sample)",
        "verified_swa=self._verified(tokens.full, sample)",
        _SIGNALS,
    ),
    ("index_divergence=tokens.diverging", "index_divergence=tokens.out_of_window", _TOKENS),
    ("sample is None or step == 0", "sample is None", _EARLY),
    ("sample is None or step == 0", "step == 0", _EARLY),
    (
        "interval if interval and self._adapter is not None else _NEVER",
        "interval if self._adapter is not None else _NEVER",
        _AT_DETACH,
    ),
)

TABLES = mutants(
    "canary_obs/engines/vllm/window_tables.py",
    ("np.maximum(before - window + 1, 0)", "np.maximum(before - window, 0)", _WALKED),
    ("held & (own != other)", "own != other", _WALKED),
    (
        "diverging=min(",
        "diverging=max(",
        "tests/engines/vllm/test_window_tables.py::test_of_several_groups_the_least",
    ),
)

_DRAFTS = "tests/engines/vllm/test_draft_groups.py::"
DRAFTS = mutants(
    "canary_obs/engines/vllm/draft_groups.py",
    (
        "int(runner.max_model_len)",
        "int(runner.max_model_len) + 1",
        _DRAFTS + "test_every_slot_that_drafting_may_write_loses_its_record",
    ),
    (
        "input_ids=memory.input_ids[:total]",
        "input_ids=target.input_ids[:total]",
        _DRAFTS + "test_the_forward_is_reported_as_it_was_when_the_target_ran",
    ),
)

STATE = mutants(
    "canary_obs/runtime/device/state.py",
    (
        "self._rows_of(destination), self.records_of(source))",
        "self._rows_of(source), self.records_of(source))",
        "tests/runtime/test_announcements.py::test_an_announced_copy_carries_its_records",
    ),
    (
        "self._reset(slots, layout.RecordState.ADOPTED)\n        self.take_baseline",
        "self._reset(slots, layout.RecordState.EMPTY)\n        self.take_baseline",
        "tests/runtime/test_announcements.py::test_received_bytes_without_records_get_a_baseline_on_arrival",
    ),
)

BATCHES = mutants(
    "canary_obs/runtime/device/batches.py",
    ("torch.sub(prefix_lens, self._window - 1,", "torch.sub(prefix_lens, self._window,", _CLEAN + "[swa]"),
)

ANNOUNCEMENTS = mutants(
    "canary_obs/runtime/announcements.py",
    (
        "slots, layout.Phase.HEAD)",
        "slots[:0], layout.Phase.HEAD)",
        "tests/runtime/test_host_tier.py::test_a_bit_flipped_in_host_memory_is_detected_before_its_first_use",
    ),
    (
        "        self._checks.before_load(group, slots, step)\n",
        "",
        "tests/runtime/test_transfer.py::test_what_was_in_a_slot_is_compared_before_a_transfer_is_awaited_in_it",
    ),
)

_LOADED = (
    "tests/runtime/test_host_tier.py"
    "::test_what_a_load_writes_over_is_compared_before_and_its_readers_are_listed"
)

BEFORE_LOADS = (
    *mutants(
        "canary_obs/runtime/taint/tracker.py",
        (
            "not (arrived or before_load or",
            "not (arrived or",
            "tests/runtime/taint/test_tracker.py"
            "::test_what_a_load_writes_over_was_read_by_who_held_it_before",
        ),
    ),
    *mutants(
        "canary_obs/engines/reference/host_tier_hooks.py",
        ("            self._observer.before_load(group, slots)\n", "            pass\n", _LOADED),
    ),
    *mutants(
        "canary_obs/engines/reference/transfer_hooks.py",
        (
            "            self._observer.before_load(group, slots)\n",
            "",
            "tests/runtime/test_transfer.py"
            "::test_what_was_in_a_slot_is_compared_before_a_transfer_is_awaited_in_it",
        ),
    ),
    *mutants(
        "canary_obs/runtime/device/violation_log.py",
        (
            "arrivals.is_before(row[layout.ROW_STEP])",
            "arrivals.is_before(row[layout.ROW_STEP] + 1)",
            "tests/runtime/device/test_arrivals.py::test_a_row_says_whether_it_is_of_what_a_load_wrote_over",
        ),
    ),
)

ASYNC_CHECKER = mutants(
    "canary_obs/runtime/patrol/async_checker.py",
    (
        "_LANES, _RUN = slice(layout.NUM_LANES * _WORD)",
        "_LANES, _RUN = slice(layout.NUM_REASONS * _WORD)",
        "tests/runtime/patrol/test_patrol.py::test_a_confirmed_suspicion_is_counted_once_per_cycle",
    ),
    (
        "max(0, done.run - ran)",
        "0",
        "tests/runtime/patrol/test_patrol.py::test_slots_counted_without_a_run_are_stalled",
    ),
    (
        "0 <= self._in_flight[0].copy <= newest",
        "0 <= self._in_flight[0].copy",
        "tests/runtime/patrol/test_patrol.py::test_a_result_comes_with_a_copy_pushed_after_the_job_was_done",
    ),
    (
        "flight.suspicious = True",
        "pass",
        "tests/runtime/patrol/test_patrol.py::test_violations_counted_by_a_later_job_are_not_lost",
    ),
    (
        "self._runs[number] -= lost_run",
        "pass",
        "tests/runtime/patrol/test_patrol.py::test_a_lost_run_is_reported_once",
    ),
    (
        "else sums.clone()",
        "else sums",
        "tests/runtime/patrol/test_patrol.py::test_the_checker_writes_only_memory_of_its_own",
    ),
)

PATROL = mutants(
    "canary_obs/runtime/patrol/patrol.py",
    (
        "            if idle or not self._was_idle:\n",
        "            if True:\n",
        "tests/runtime/patrol/test_patrol.py::test_a_job_chosen_while_idle_is_not_submitted_during_forwards",
    ),
    (
        "self._cursor = job.first_chunk",
        "pass",
        "tests/runtime/patrol/test_patrol.py::test_a_job_chosen_while_idle_is_not_submitted_during_forwards",
    ),
    (
        "(self._rate if self._was_idle else busy_rate)",
        "rate",
        "tests/runtime/patrol/test_patrol.py::test_a_long_forward_earns_the_busy_rate",
    ),
    (
        "max(self._intact[chunk], job.step)",
        "self._state.step - 1",
        "tests/runtime/patrol/test_patrol.py::test_a_pass_is_as_old_as_its_own_job",
    ),
    (
        "-1 if newest is None else newest.step",
        "self._state.step - 1",
        "tests/runtime/patrol/test_patrol.py::test_a_pass_is_of_forwards_that_were_over",
    ),
)

STEP_SCHEDULER = mutants(
    "canary_obs/runtime/step_scheduler.py",
    (
        "                run_task()\n",
        "                self._run_all(0.0)\n",
        "tests/runtime/test_step_scheduler.py::test_a_step_runs_one_task_and_tasks_rotate",
    ),
    (
        "        urgent = urgent or self._workers.counter_reader.alarmed\n",
        "",
        "tests/runtime/test_step_scheduler.py::test_rows_of_a_violation_are_read_in_every_step",
    ),
    (
        "            with self._stream:\n                patrol.confirm(suspicious)",
        "            patrol.confirm(suspicious)",
        "tests/runtime/test_step_scheduler.py::test_suspicious_jobs_are_confirmed_on_the_given_stream",
    ),
    (
        "            with self._stream:\n                self._workers.commands.execute(commands)",
        "            self._workers.commands.execute(commands)",
        "tests/runtime/test_step_scheduler.py::test_commands_are_executed_on_the_given_stream",
    ),
    (
        "            self.settle()\n        if urgent:\n",
        "            pass\n        if urgent:\n",
        "tests/runtime/test_step_scheduler.py::test_what_was_not_shown_is_looked_for_before_anything_is_compared",
    ),
    (
        "        if not self._rotating:\n            self.settle()\n",
        "        if not self._rotating:\n",
        "tests/runtime/test_step_scheduler.py::test_what_was_not_shown_is_looked_for_before_anything_is_compared",
    ),
    (
        "        if self._untasked < _SECONDS_BETWEEN_TASKS:\n            return\n",
        "",
        "tests/runtime/test_step_scheduler.py::test_short_steps_run_a_task_every_four_milliseconds",
    ),
    (
        "self._untasked += _SECONDS_BETWEEN_TASKS if last is None else seconds",
        "self._untasked = _SECONDS_BETWEEN_TASKS if last is None else seconds",
        "tests/runtime/test_step_scheduler.py::test_short_steps_run_a_task_every_four_milliseconds",
    ),
    (
        "        if self._copy_wanted:  # requested six",
        "        if False:  # requested six",
        "tests/runtime/test_step_scheduler.py::test_a_requested_copy_is_started_without_a_forward_too",
    ),
    (
        "self._sweep_at = run.step // self._interval * self._interval + self._interval",
        "self._sweep_at = run.step + self._interval",
        "tests/runtime/test_step_scheduler.py::test_an_interval_sweep_begins_at_its_step_and_is_urgent",
    ),
    (
        "min(1 + int(seconds / _SECONDS_PER_TASK), _MAX_TASKS)",
        "1 + int(min(seconds, 60.0) / _SECONDS_PER_TASK)",
        "tests/runtime/test_step_scheduler.py::test_a_pause_of_the_engine_is_no_long_step",
    ),
    (
        "if not self._rotating:",
        "if False:",
        "tests/runtime/test_step_scheduler.py::test_on_a_cpu_every_step_runs_all_tasks",
    ),
)

HELD_BLOCKS = mutants(
    "canary_obs/runtime/taint/held_blocks.py",
    (
        "        self._settle()\n        return self._columns",
        "        return self._columns",
        "tests/runtime/taint/test_held_blocks.py::test_rows_are_in_the_order_of_their_forwards",
    ),
    (
        "        self._settle()\n        size = added",
        "        size = added",
        "tests/runtime/taint/test_held_blocks.py::test_rows_are_in_the_order_of_their_forwards",
    ),
)

STATE_LOG = mutants(
    "canary_obs/runtime/report/state_log.py",
    (
        "if not worse and self._clock()",
        "if self._clock()",
        "tests/runtime/report/test_state_log.py::test_a_flickering_state_is_rate_limited_and_a_worse_one_is_not",
    ),
    (
        "_NUMBER.sub(_shape, reason)",
        "reason",
        "tests/runtime/report/test_state_log.py::test_a_change_is_logged_once_with_its_reasons",
    ),
)

HEALTH = mutants(
    "canary_obs/runtime/health.py",
    (
        "self._rebase(group, phase, missing)",
        "pass",
        "tests/runtime/test_health.py::test_a_lost_run_is_reported_once_until_acknowledged",
    ),
    (
        "self.stalled.clear()",
        "pass",
        "tests/runtime/test_health.py::test_a_lost_run_is_reported_once_until_acknowledged",
    ),
    (
        "if health_inputs.violations > self._acknowledged_violations:",
        "if health_inputs.violations > self._acknowledged_violations + 2:",
        "tests/runtime/test_health.py::test_each_input_can_end_ok",
    ),
)

LOG = mutants(
    "canary_obs/runtime/device/violation_log.py",
    (
        "(events > done) &",
        "(events >= done) &",
        "tests/runtime/device/test_violation_log.py::test_each_event_is_read_once",
    ),
    (
        "log[group, number]  #",
        "log.tolist() and log[group, number]  #",
        "tests/runtime/device/test_violation_log.py::test_no_row_is_looked_at_that_was_read_or_never_written",
    ),
    (
        "self.dropped += lost",
        "self.dropped += 0",
        "tests/runtime/device/test_violation_log.py::test_a_flood_keeps_the_first_and_latest_rows_and_counts_the_rest",
    ),
    (
        "hidden = reason in _PRIVATE and not self._reveal",
        "hidden = reason is Reason.TOKEN and not self._reveal",
        "tests/runtime/device/test_violation_log.py::test_digests_and_tokens_are_redacted_unless_revealed",
    ),
)

COUNTER_READER = mutants(
    "canary_obs/runtime/device/counter_reader.py",
    (
        "self.alarmed, self._alarmed_at = True, time.monotonic()",
        "self.alarmed, self._alarmed_at = self.log.has_unread(self.violations), time.monotonic()",
        "tests/runtime/test_step_scheduler.py::test_rows_that_cannot_be_read_are_read_later",
    ),
)

SENDER = mutants(
    "canary_obs/transport/sender.py",
    (
        "self._rejected += not isinstance(message, Snapshot)",
        "self._rejected += 1",
        "tests/transport/test_sender.py::test_after_close_messages_are_dropped",
    ),
    (
        "                self._outbox.appendleft(message)",
        "                pass",
        "tests/transport/test_sender.py::test_a_full_queue_keeps_violations_and_drops_snapshots",
    ),
    (
        "self._link.dropped - dropped - keep",
        "self._link.dropped - dropped",
        "tests/transport/test_sender.py::test_a_full_queue_keeps_violations_and_drops_snapshots",
    ),
    (
        "and self._polls_to_retry > 0 and not self._closed",
        "and self._polls_to_retry > 0",
        "tests/transport/test_sender.py::test_a_full_queue_is_not_retried_at_every_poll",
    ),
    (
        "            self._wakeup.set()\n        return True",
        "            pass\n        return True",
        "tests/transport/test_sender.py::test_messages_other_than_snapshots_are_sent_at_once",
    ),
)

DEVICE_HOST = mutants(
    "canary_obs/runtime/device/delayed_device_host.py",
    ("self.skipped += 1", "pass", _HOST + "test_a_full_ring_skips_and_counts_and_recovers"),
    (
        "words = row.words.copy()",
        "words = row.words",
        _HOST + "test_a_sample_does_not_change_when_its_row_is_reused",
    ),
    (
        "return max(step - arrived, 0)",
        "return max(step - oldest.step, 0)",
        _HOST + "test_lag_is_zero_when_nothing_is_in_flight",
    ),
    (
        "self._free.append(newest.row)",
        "pass",
        _HOST + "test_newest_drops_the_copies_before_it",
    ),
)

COUNTERS = mutants(
    "canary_obs/hub/counters.py",
    (
        "    return current + earlier\n",
        "    return max(current, earlier)\n",
        "tests/hub/test_hub.py::test_counters_are_summed_over_a_restart",
    ),
    (
        "return earlier | current | {key",
        "return current | {key",
        "tests/hub/test_hub.py::test_a_group_that_is_gone_after_a_restart_keeps_its_counts",
    ),
)

RANKS = mutants(
    "canary_obs/hub/ranks.py",
    (
        "snapshot.sequence > self.snapshot.sequence",
        "snapshot.sequence != self.snapshot.sequence",
        "tests/hub/test_hub.py::test_an_older_snapshot_does_not_replace_a_newer_one",
    ),
    (
        "return State.VIOLATED if violated else State.BLIND, (blind, *reasons)",
        "return State.BLIND, (blind, *reasons)",
        "tests/hub/test_hub.py::test_a_violated_rank_stays_violated_when_it_falls_silent",
    ),
)

IDLE = mutants(
    "canary_obs/runtime/canary.py",
    (
        "or self.counter_reader.alarmed",
        "or self.counter_reader.busy",
        "tests/runtime/test_canary.py::test_counters_on_their_way_are_no_reason_to_call_an_idle_engine_soon",
    ),
    (
        "or self.counter_reader.alarmed",
        "or False",
        "tests/runtime/test_canary.py::test_an_idle_engine_that_has_found_something_is_called_soon",
    ),
)

WIRE = mutants(
    "canary_obs/transport/wire.py",
    (
        "if version != PROTOCOL_VERSION:",
        "if version > 255:",
        "tests/transport/test_wire.py::test_another_protocol_version_is_refused_with_both_numbers",
    ),
    (
        "PROTOCOL_VERSION = 3",
        "PROTOCOL_VERSION = 2",
        "tests/transport/test_wire.py::test_a_changed_schema_has_a_new_version",
    ),
)

ALL = (
    *SWEEP, *WALK, *DIVERGENCE, *TABLES, *DRAFTS, *STATE, *BATCHES, *ANNOUNCEMENTS, *BEFORE_LOADS,
    *ASYNC_CHECKER, *PATROL, *STEP_SCHEDULER, *HELD_BLOCKS, *STATE_LOG, *HEALTH, *LOG,
    *COUNTER_READER, *SENDER, *DEVICE_HOST, *COUNTERS, *RANKS, *IDLE, *WIRE,
)  # fmt: skip
