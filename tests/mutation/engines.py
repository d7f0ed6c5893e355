"""Defects seeded in what shows an engine to the canary."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_CLEAN = "tests/runtime/test_models.py::test_traffic_is_clean"

DIGESTS = mutants(
    "canary_obs/engines/reference/digests.py",
    (
        "fresh = (self._owner[rows] != serials) | (starts > ends)",
        "fresh = starts > ends",
        "tests/engines/reference/test_adapter.py::test_digests_survive_row_changes_and_restarts",
    ),
    (
        "positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - starts, lengths)",
        "positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)",
        "tests/engines/reference/test_adapter.py::test_digests_survive_row_changes_and_restarts",
    ),
)

INSTRUMENTED = mutants(
    "canary_obs/engines/reference/instrumented.py",
    (
        """        observer.before_write(view)
        side_stream.mark()
        try:
            logits = forward(batch)
""",
        """        side_stream.mark()
        try:
            logits = forward(batch)
            observer.before_write(view)
""",
        "tests/engines/reference/test_instrumented.py::test_damage_in_a_slot_about_to_be_overwritten_is_seen",
    ),
)

CAPTURED = mutants(
    "canary_obs/reference_engine/execution/graph.py",
    (
        "with _uncollected(), torch.cuda.graph",
        "with torch.cuda.graph",
        "tests/reference_engine/test_graph.py::test_nothing_is_collected_during_a_capture",
    ),
)

PROMPTS = mutants(
    "canary_obs/engines/vllm/request_changes.py",
    (
        "rewritten=group.states",
        "rewritten=False",
        "tests/engines/vllm/test_request_changes.py::"
        "test_null_blocks_are_left_out_and_states_are_written_over_in_place",
    ),
    (
        "prompt = len(ids if ids is not None else new.prompt_embeds)",
        "prompt = int(new.prompt_len)",
        "tests/engines/vllm/test_scheduler_fields.py::test_every_field_that_is_read_is_listed",
    ),
    (
        "                computed -= len(undecided.get(name, ()))\n",
        "                pass\n",
        "tests/engines/vllm/test_request_changes.py::"
        "test_drafts_whose_results_are_not_known_yet_are_not_computed[True-7]",
    ),
)

_CLOCK = "tests/engines/vllm/test_adapter.py::test_what_follows_a_forward_is_on_the_adapters_clock"
_CHANGES = "tests/engines/vllm/test_request_changes.py::"
_LATE = _CHANGES + "test_changes_are_shown_together_and_in_order_with_the_forwards_before_them"
LATE = (
    *mutants(
        "canary_obs/engines/vllm/request_changes.py",
        (
            "        self.settle()\n        begun",
            "        begun",
            _LATE + "[an output without a forward]",
        ),
        ("_begun_by(output), observer.step", "_begun_by(output), None", _LATE + "[a finding]"),
        (
            "new.num_computed_tokens, begun[name].emitted",
            "new.num_computed_tokens, _new(new).emitted",
            _CHANGES + "test_what_one_had_emitted_is_shown_though_it_has_emitted_more[4]",
        ),
        (
            "emitted = then.emitted if",
            "emitted = _new(new).emitted if",
            _CHANGES + "test_what_one_had_emitted_is_shown_though_it_has_emitted_more[9]",
        ),
        (
            "waiting.popleft()()",
            "waiting.pop()()",
            _LATE + "[a finding]",
        ),
        (
            ">= _TOGETHER or observer.follows_readers",
            ">= _TOGETHER",
            _CHANGES + "test_who_reads_damage_is_shown_in_the_same_step",
        ),
        (
            "[ids[:count] for ids, count in zip(blocks, then.blocks, strict=True)]",
            "list(blocks)",
            _CHANGES + "test_what_one_had_when_it_began_is_shown_though_its_list_has_grown",
        ),
        (
            "                    own += more\n",
            "                    pass\n",
            _CHANGES + "test_an_output_that_gives_blocks_alone_adds_to_the_lists_at_once",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/report.py",
        (
            "        self._adapter.show_requests()  # what happened before counts as running now\n",
            "",
            "tests/runtime/test_canary.py::"
            "test_requests_that_were_not_shown_before_it_is_ready_are_not_followed_later",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/follows_requests.py",
        (
            " and self.inputs_persist:",
            ":",
            _CHANGES + "test_changes_that_something_else_precedes_are_shown_at_once[the inputs change]",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/prefix_hits.py",
        (
            "if not observer.compares_hits:",
            "if observer.compares_hits is None:",
            "tests/engines/vllm/test_prefix_hits.py::test_slots_that_nobody_compares_are_not_listed",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/adapter.py",
        (
            "            self.requests.settle()\n        if known",
            "            pass\n        if known",
            _LATE + "[enough of them]",
        ),
        (
            'guarded(self._hooks.observer, "announce", self.show_requests)  #',
            "#",
            _CHANGES + "test_what_waits_is_shown_before_the_last_findings_are_read[False]",
        ),
        ("if not (self.requests.due or known.due", "if not (known.due", _CLOCK + "[requests]"),
        (
            'observer.overhead["adapter"] += time.perf_counter() - started',
            "time.perf_counter()",
            _CLOCK + "[blocks]",
        ),
    ),
    *mutants(
        "canary_obs/runtime/slot_hooks.py",
        (
            "run.step if shown.step is None else shown.step",
            "run.step",
            "tests/runtime/test_slot_hooks.py::"
            "test_requests_changed_after_the_forward_that_they_are_shown_with[8-8]",
        ),
    ),
)

INPUTS = mutants(
    "canary_obs/engines/toolkit/device_digests.py",
    (
        "(ended <= computed + self._drafts)",
        "(ended <= computed)",
        "tests/engines/toolkit/test_device_digests.py::test_counts_of_the_host_that_run_ahead_of_rejected_drafts",
    ),
)

TOKENS = mutants(
    "canary_obs/engines/toolkit/token_digests.py",
    (
        "kept = self._counts > 0",
        "kept = self._counts >= 0",
        "tests/engines/toolkit/test_token_digests.py::test_nothing_is_kept_of_requests_that_ended",
    ),
    (
        "kept = self._counts > 0",
        "kept = self._counts == 0",
        "tests/engines/toolkit/test_token_digests.py::test_nothing_is_kept_of_requests_that_ended",
    ),
    (
        "            self._absent.pop(request, None)\n",
        "",
        "tests/engines/toolkit/test_token_digests.py::test_nothing_is_kept_of_requests_that_ended",
    ),
)

_SUMS = "tests/engines/toolkit/test_chain_sums.py::test_chains_go_on_with_the_tokens_of_their_requests"
_NO_TOKEN = "tests/engines/toolkit/test_chain_sums.py::test_what_is_no_token_is_refused_in_an_array"
_RUNS = "tests/kernels/test_digest.py::test_runs_with_other_tokens_than_theirs_change_nothing"
CHAINS = (
    *mutants(
        "canary_obs/engines/toolkit/chain_sums.py",
        ("after = chains.copy()", "after = chains", _SUMS),
        ("ids if ids.flags.writeable else ids.copy()", "ids", _SUMS + "[False]"),
        ("if not np.array_equal(found, wide)", "if False", _NO_TOKEN + "[2147483648]"),
    ),
    *mutants(
        "kernels/canary_kernels/digest/cpu.py",
        ("    if wanted != tokens.shape[0]:\n        return wanted\n    place", "    place", _RUNS),
        ("wanted += max(stops[row] - starts[row], 0)", "wanted += stops[row] - starts[row]", _RUNS),
    ),
)

WINDOWS = mutants(
    "canary_obs/engines/reference/swa_group.py",
    ("torch.from_numpy(slots.of[full])", "torch.from_numpy(full % slots.owner.size)", _CLEAN + "[swa]"),
)

RESIDENT = mutants(
    "canary_obs/reference_engine/cache/window_slots.py",
    (
        "np.minimum(ends, self.window - 1)",
        "np.minimum(ends, self.window - 2)",
        "tests/reference_engine/test_windows.py::test_resumable_lengths",
    ),
    (
        "        self.of[full] = NONE\n",
        "        pass\n",
        "tests/reference_engine/test_windows.py::test_load_is_exact_and_accounted_for",
    ),
)

TRAVEL = mutants(
    "canary_obs/engines/reference/transfer_hooks.py",
    (
        "return torch.cat(records, dim=-1) if",
        "return torch.cat(records[::-1], dim=-1) if",
        "tests/reference_engine/test_disaggregated.py::test_every_byte_of_a_slot_travels",
    ),
) + mutants(
    "canary_obs/engines/reference/groups.py",
    (
        "if group.numbering is not None:",
        'if group.numbering == "full":',
        "tests/reference_engine/test_disaggregated.py::test_every_byte_of_a_slot_travels",
    ),
)

IDLE = mutants(
    "canary_obs/engines/toolkit/idle_thread.py",
    (
        "if now - last_busy < QUIET_SECONDS:",
        "if False:",
        "tests/engines/toolkit/test_idle_thread.py::test_right_after_a_long_forward_it_waits_for_the_next_step",
    ),
    (
        "last_busy = last_busy if idle_since_step == last_step else now",
        "last_busy = now",
        "tests/engines/toolkit/test_idle_thread.py::test_its_own_work_does_not_make_it_wait",
    ),
)

BLOCKS = mutants(
    "canary_obs/engines/vllm/cached_blocks.py",
    (
        "rows[1:, 2] = self._clock",
        "rows[1:, 2] = NEVER",
        "tests/engines/vllm/test_cached_blocks.py::test_a_run_stands_for_its_blocks_one_by_one",
    ),
)

_STEADY = "tests/engines/vllm/test_steady_step.py::"
STEADY = mutants(
    "canary_obs/engines/vllm/steady_step.py",
    (
        "hits != self._hits  # by value: it may have come from another process\n            or hits is None",
        "hits is None",
        _STEADY + "test_whatever_an_output_says_is_followed",
    ),
    (
        "            hits != self._hits ",
        "            hits is not self._hits ",
        _STEADY + "test_an_output_that_came_from_another_process_is_steady",
    ),
    (
        "            or output.preempted_req_ids\n",
        "",
        _STEADY + "test_whatever_an_output_says_is_followed",
    ),
    (
        "            or self._loads.open\n",
        "",
        _STEADY + "test_what_changes_by_itself_is_followed_in_every_step",
    ),
    (
        "if not events and given.count(None) == len(given):",
        "if given.count(None) == len(given):",
        _STEADY + "test_events_of_the_pool_are_followed",
    ),
    (
        "            or events is None\n",
        "",
        _STEADY + "test_what_a_load_brings_or_nobody_knows_is_followed",
    ),
    ("grows = self._states is None and", "grows =", _STEADY + "test_an_output_that_gives_blocks_grows"),
    (
        " and _OF_BLOCKS.issuperset(map(type, events))",
        "",
        _STEADY + "test_what_a_load_brings_or_nobody_knows_is_followed",
    ),
    (
        "            or output.scheduled_new_reqs\n",
        "",
        _STEADY + "test_an_output_that_says_more_than_blocks_is_followed",
    ),
)

_REPORTS = "tests/engines/vllm/test_scheduler_reports.py::"

_ATTACHED = "tests/engines/vllm/test_output_reports.py::"
_ALIKE = _ATTACHED + "test_the_same_is_attached_as_by_all_reports"

SCHEDULER = (
    *mutants(
        "canary_obs/engines/vllm/scheduler_reports.py",
        (
            'overhead["scheduler"] = spent - self._first',
            'overhead["scheduler"] = spent',
            _REPORTS + "test_the_time_of_reports_reaches_the_worker_since_it_attached",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/output_reports.py",
        (
            "        except Exception as error:  # noqa: BLE001 - as above",
            "        except ZeroDivisionError as error:",
            _REPORTS + "test_a_report_that_fails_keeps_no_other_back",
        ),
        (
            "        due = REPORTS\n",
            "        due = ()\n",
            _ATTACHED + "test_what_cannot_be_asked_is_reported_as_a_whole",
        ),
        ("pool.__dict__.get(PENDING) or ADMITTED in", "ADMITTED in", _ALIKE),
        (
            "pool.__dict__.get(PENDING) or ADMITTED in manager.coordinator.__dict__",
            "pool.__dict__.get(PENDING)",
            _ALIKE,
        ),
        ("count is None or count.changes or count.reported is None or due", "count is None", _ALIKE),
        ("unchanged is None or due or noted.get(TOKENS)", "unchanged is None", _ALIKE),
        ("    if output.scheduled_new_reqs:\n", "    if False:\n", _ALIKE),
        ("held.get(HEALER_ATTRIBUTE) is not None", "False", _ALIKE),
        ("    if output.total_num_scheduled_tokens:\n", "    if True:\n", _ALIKE),
    ),
    *mutants(
        "canary_obs/engines/vllm/block_events.py",
        (
            "if start < stop and None not in",
            "if None not in",
            "tests/engines/vllm/test_block_events.py::test_runs_of_blocks",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/pending_events.py",
        (
            "    vars(pool).setdefault(PENDING, []).append(EventsLost(1))",
            "    pass",
            _REPORTS + "test_events_that_cannot_be_recorded_are_lost_and_said",
        ),
    ),
)

ALL = (
    *DIGESTS, *INSTRUMENTED, *CAPTURED, *INPUTS, *TOKENS, *CHAINS, *WINDOWS, *RESIDENT, *TRAVEL, *IDLE,
    *BLOCKS, *STEADY, *SCHEDULER, *PROMPTS, *LATE,
)  # fmt: skip
