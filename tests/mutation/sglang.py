"""Seeded defects of the adapter for SGLang."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/engines/sglang/"
_CHAINS, _FREED, _TREE = (
    f"{_TESTS}test_{name}.py::" for name in ("request_chains", "freed_slots", "prefix_tree")
)
_HOOKS, _VIEWS, _LIMITS = (f"{_TESTS}test_{name}.py::" for name in ("step_hooks", "batch_views", "limits"))
_TIER = f"{_TESTS}test_host_tier.py::"
_HIERARCHICAL = f"{_TESTS}test_hierarchical_cache.py::"
_SEVERAL = f"{_TESTS}test_several_drafts.py::"
_WHERE_LAYERS_LOOK = (
    f"{_TESTS}test_states.py::test_a_record_goes_where_the_scheduler_says_and_is_read_where_the_layers_look"
)
_AROUND_CALLS = f"{_TESTS}test_states.py::test_changes_are_announced_around_the_call_that_makes_them"
_ORDER = f"{_TESTS}test_transfer_order.py::"
_STATE_SENT = f"{_TESTS}test_disaggregation.py::test_a_request_has_one_state_which_goes_along_whole"
_RETRACTED = f"{_TESTS}test_retracted_copies.py::test_"
_STREAMS, _COPIES, _RANKS = (
    f"{_TESTS}test_{name}.py::" for name in ("stream_hooks", "device_views", "ranks")
)
_DECODE = _VIEWS + "test_a_decode_continues_after_all_tokens_but_the_newest"

ALL = (
    *mutants(
        "canary_obs/engines/sglang/request_chains.py",
        (
            "            if start > prefix:",
            "            if False:",
            _CHAINS + "test_a_request_that_was_retracted_is_computed_anew",
        ),
        (
            "            or (ends - prefixes).tolist() != following.extends\n",
            "",
            _CHAINS + "test_a_batch_that_repeats_but_for_its_prefixes_is_computed_anew",
        ),
        (
            "list(map(len, outputs)) != self.lengths or ",
            "",
            _CHAINS + "test_a_batch_whose_answers_grow_unevenly_is_computed_anew",
        ),
        (
            "last.stops + np.arange(count)[:, None]",
            "last.stops + np.arange(count)[:, None] * 0",
            _CHAINS + "test_tokens_of_batches_that_follow_are_added_later",
        ),
        (
            "following is None or not following.decodes or not",
            "following is None or not",
            _CHAINS + "test_a_batch_that_extends_by_more_is_not_one_token_on",
        ),
        (
            "min(int(ends[place]), total)",
            "int(ends[place])",
            _CHAINS + "test_the_newest_token_may_be_known_on_the_device_only",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/disaggregation.py",
        (
            "                self._spliced[name].fill(cached[cached > 0], None)\n",
            "                pass\n",
            f"{_TESTS}test_disaggregation.py::test_what_comes_without_records_gets_a_baseline",
        ),
        (
            "(found[:count, _PRINTS] != prints).any(1)",
            "torch.zeros(count, dtype=torch.bool)",
            f"{_TESTS}test_disaggregation.py::test_no_record_goes_with_bytes_of_another_computation",
        ),
        (
            "(found[:count, _PRINTS] != prints).any(1)",
            "torch.ones(count, dtype=torch.bool)",
            f"{_TESTS}test_disaggregation.py::test_the_record_of_another_computation_with_the_same_bytes_is_as_good",
        ),
        (
            "(withheld[own] != 0) & (withheld[own] == found[:, FINGERPRINT_K])",
            "withheld[own] != 0",
            f"{_TESTS}test_disaggregation.py::test_no_record_goes_with_bytes_of_another_computation",
        ),
        (
            '{request.bootstrap_port}" if sent else ""',
            '{request.bootstrap_port}" if not sent else ""',
            f"{_TESTS}test_disaggregation.py::test_records_leave_with_the_kv_and_are_compared_when_it_is_there",
        ),
        (
            "own[own > 0], peer, str(request.rid))",
            'own[own > 0], peer, "")',
            f"{_TESTS}test_disaggregation.py::test_records_leave_with_the_kv_and_are_compared_when_it_is_there",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/untried.py",
        (
            ", (cache, trees)):",
            ",):",
            f"{_TESTS}test_untried.py::test_engines_on_gpus_that_were_not_run_are_untried",
        ),
        (
            "if (value := getattr(arguments, name)) > 1}",
            "if (value := getattr(arguments, name)) > 2}",
            f"{_TESTS}test_untried.py::test_engines_on_gpus_that_were_not_run_are_untried",
        ),
        (
            "if arguments.tp_size == arguments.dp_size:",
            "if arguments.tp_size:",
            f"{_TESTS}test_untried.py::test_engines_on_gpus_that_were_not_run_are_untried",
        ),
        (
            "not in _TRIED_BACKENDS:",
            "is None:",
            f"{_TESTS}test_untried.py::test_pairs_that_were_not_run_are_untried",
        ),
        (
            "not in _TRIED_POOLS:",
            "is None:",
            f"{_TESTS}test_untried.py::test_pairs_that_were_not_run_are_untried",
        ),
        (
            '["a hierarchical cache"] if arguments.enable_hierarchical_cache else []',
            "[]",
            f"{_TESTS}test_untried.py::test_pairs_that_were_not_run_are_untried",
        ),
        (
            '["KV that is stored"] if arguments.disaggregation_decode_enable_offload_kvcache else []',
            "[]",
            f"{_TESTS}test_untried.py::test_pairs_that_were_not_run_are_untried",
        ),
        (
            '["drafts"] if arguments.speculative_algorithm is not None else []',
            "list[str]()",
            f"{_TESTS}test_untried.py::test_pairs_that_were_not_run_are_untried",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/disaggregation.py",
        (
            "pages[: cached // int(group.allocator.page_size)] = 0",
            "pages[:0] = 0",
            f"{_TESTS}test_disaggregation.py::test_records_of_what_is_cached_here_replace_nobodys",
        ),
        (
            "pages = state_pages[-place].copy()",
            "pages = state_pages[-place]",
            f"{_TESTS}test_disaggregation.py::test_records_of_what_is_cached_here_replace_nobodys",
        ),
        (
            'if getattr(request, "pd_rebootstrap_in_progress", False) else 0',
            "if False else 0",
            f"{_TESTS}test_disaggregation.py::test_a_request_that_is_computed_anew_has_its_answer_sent_too",
        ),
        (
            "max(begun - begun % int(group.allocator.page_size) - first, 0)",
            "max(begun - first, 0)",
            f"{_TESTS}test_disaggregation.py::test_the_page_in_which_a_window_begins_was_sent_whole",
        ),
        (
            "            if last_chunk:",
            "            if True:",
            f"{_TESTS}test_disaggregation.py::test_records_are_filled_with_the_last_chunk",
        ),
        (
            "(pages[:, None] * held + of_pages).reshape(-1)",
            "own",
            f"{_TESTS}test_disaggregation.py::test_nothing_is_known_of_the_pages_that_are_to_arrive",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/retracted_copies.py",
        (
            "                kept[copied] = found\n",
            "                pass\n",
            f"{_RETRACTED}a_copy_comes_back_with_the_records_it_was_made_with",
        ),
        (
            "            kept[~copied] = _NOT_COPIED\n",
            "",
            f"{_RETRACTED}slots_of_windows_and_of_runs_have_their_own",
        ),
        (
            " if name != DRAFT}",
            "}",
            f"{_RETRACTED}a_draft_models_kv_is_not_among_what_is_copied",
        ),
        (
            "        if self._drafts is not None:",
            "        if False:",
            f"{_RETRACTED}a_draft_models_kv_is_not_among_what_is_copied",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/groups.py",
        (
            "row[(-first - 1) % group.ratio :: group.ratio]",
            "row[:: group.ratio]",
            f"{_RETRACTED}slots_of_windows_and_of_runs_have_their_own",
        ),
    ),
    *mutants(
        "canary_obs/runtime/device/violation_log.py",
        (
            "request = arrivals.request_of(row[layout.ROW_STEP])",
            "request = None",
            "tests/runtime/device/test_arrivals.py"
            "::test_a_row_of_an_arrival_names_its_request_and_one_of_a_forward_the_forwards_own",
        ),
    ),
    *mutants(
        "canary_obs/copy_records/draft_trees.py",
        (
            "            self._nodes[:, destination] = self._nodes[:, source]\n",
            "",
            "tests/copy_records/test_draft_trees.py::test_an_accepted_path_has_what_was_moved_into_its_slots",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/draft_views.py",
        (
            "self._pairs = bool(scheduler.spec_algorithm.is_eagle())",
            "self._pairs = True",
            f"{_TESTS}test_draft_views.py::test_without_pairs_a_slot_has_its_own_token",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/several_drafts.py",
        (
            "out_slots=own_slots(own, batch.out_cache_loc)",
            "out_slots=batch.out_cache_loc",
            _SEVERAL + "test_windows_are_in_the_targets_slots_for_them",
        ),
        (
            "if shown.input_ids.shape != batch.out_cache_loc.shape or ",
            "if ",
            _SEVERAL + "test_another_batch_than_the_targets_is_not_shown",
        ),
        (
            "            positions=batch.positions,\n",
            "",
            _SEVERAL + "test_a_slot_has_its_own_token_and_the_models_own_place",
        ),
        (
            "        self._target.last = None\n",
            "        pass\n",
            _SEVERAL + "test_another_batch_than_the_targets_is_not_shown",
        ),
    ),
    *mutants(
        "canary_obs/copy_records/draft_trees.py",
        (
            "torch.where(found > 0, found, -1)",
            "found",
            _VIEWS + "test_a_window_group_is_shown_by_its_own_slots",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/batch_views.py",
        (
            "replace(view, input_ids=view.input_ids.clone())",
            "view",
            _VIEWS + "test_the_newest_view_is_kept_where_several_models_draft",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/prefix_tree.py",
        (
            "swa_resident_only=group in self._windowed",
            "swa_resident_only=group == SWA",
            _TREE + "test_a_draft_models_windows_are_cached_as_the_targets",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/speculation.py",
        (
            "            self._several.begin()\n",
            "            pass\n",
            f"{_TESTS}test_speculation.py::test_what_several_models_drafted_stays_until_it_is_written_again",
        ),
        (
            "if self._views is None or not",
            "if True or not",
            f"{_TESTS}test_speculation.py::test_what_drafting_may_write_has_no_record",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/states.py",
        (
            "slots = torch.tensor([slot_of(request) for request in requests], dtype=self._types.out_slots)",
            "slots = self._table[1 : 1 + len(requests), 0].to(self._types.out_slots)",
            _WHERE_LAYERS_LOOK,
        ),
        (
            "known_lens=torch.ones(count, dtype=torch.int64),",
            "known_lens=torch.full((count,), -1),",
            _WHERE_LAYERS_LOOK,
        ),
        (
            "np.array([crc32(name.encode()) >> 1 for name in names], dtype=np.int64)",
            "np.zeros(len(names), dtype=np.int64)",
            _WHERE_LAYERS_LOOK,
        ),
        (
            "pool.enable_mamba_extra_buffer\n",
            "False\n",
            f"{_TESTS}test_states.py::test_full_layers_are_protected_with_and_without_states",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/state_hooks.py",
        (
            "            self._runner._maybe_execute_deferred_mamba_cow_and_clear(batch)\n",
            "",
            _AROUND_CALLS,
        ),
        ("self._announce(self._observer.copied, source, destination)", "pass", _AROUND_CALLS),
        ("self._before_load(destination)", "pass", _AROUND_CALLS),
        (
            "and self._tracked is not None:  # else",
            ":  # else",
            f"{_TESTS}test_device_states.py::test_states_that_the_prefix_cache_may_have_are_always_shown",
        ),
        ("        self._checks.precede()\n", "", _AROUND_CALLS),
        ("self._announce(self._observer.invalidated, slots)", "pass", _AROUND_CALLS),
        ("self._announce(self._observer.received, slots)", "pass", _AROUND_CALLS),
        ("self._announce(self._observer.received, slots, records, HOST_PEER)", "pass", _AROUND_CALLS),
        ("indices.to(torch.int64).reshape(-1)", "indices.to(torch.int64)", _AROUND_CALLS),
    ),
    *mutants(
        "canary_obs/runtime/shown_groups.py",
        (
            "if tokens is None or tokens.known_lens is not None]",
            "if tokens is None]",
            "tests/runtime/test_known_tokens.py::test_entries_of_which_something_is_known_are_due_a_comparison",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/freed_slots.py",
        (
            "self._freed[slots.numpy() // self._page_size]",
            "self._freed[slots.numpy() % self._freed.size]",
            _FREED + "test_what_is_taken_back_is_no_longer_what_it_was",
        ),
        (
            "            free: Tensor = allocator.free_slots\n",
            "            free: Tensor = allocator.free_slots[:1]\n",
            _FREED + "test_states_that_are_in_use",
        ),
        (
            "isinstance(method, MethodType) and method ==",
            "method is",
            _FREED + "test_what_a_tree_evicts_by_a_method_it_took_before_is_followed",
        ),
        (
            '        patches.wrap(self.allocator, "clear", self._around_clear)\n',
            "",
            _FREED + "test_a_flush_takes_everything_back",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/retracted_copies.py",
        (
            "            self._observer.before_load(name, slots[slots > 0])\n",
            "            pass\n",
            _RETRACTED + "a_fault_of_the_canary_does_not_reach_the_engine_and_a_violation_does",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/disaggregation.py",
        ("if cached and is_whole(group):", "if cached and group.view.window is None:", _STATE_SENT),
        ("slots_of(group, slots) if group.by_row is None else state_slots(request)", "slots", _STATE_SENT),
        (
            "                    self._spliced[name].fill(own, None)\n",
            "                    pass\n",
            _STATE_SENT,
        ),
        (
            "                self._observer.before_load(name, slots)\n",
            "                pass\n",
            f"{_TESTS}test_disaggregation.py::test_nothing_is_known_of_the_pages_that_are_to_arrive",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/spliced_buffers.py",
        (
            "int(allocator.page_size) // group.ratio, allocator.device)",
            "int(allocator.page_size), allocator.device)",
            f"{_TESTS}test_disaggregation.py::test_records_of_runs_of_tokens_have_smaller_pages",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/transfer_order.py",
        (
            "before and before[-1].tokens < tokens else ()",
            "before else ()",
            _ORDER + "test_a_prompt_that_is_computed_anew_is_sent_after_its_new_forwards",
        ),
        (
            "(*kept, _Checked(tokens, events))",
            "(_Checked(tokens, events),)",
            _ORDER + "test_a_chunk_is_sent_after_the_forward_that_wrote_it",
        ),
        (
            "if one.tokens >= tokens",
            "if one.tokens",
            _ORDER + "test_a_chunk_is_sent_after_the_forward_that_wrote_it",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/chunk_cache.py",
        (
            "slots > 0 if SWA in self._own_slots else None",
            "self._own_slots[SWA][slots] > 0 if SWA in self._own_slots else None",
            f"{_TESTS}test_chunk_cache.py::test_windows_are_asked_for_no_slots",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/untried.py",
        (
            "*(CHUNK_CACHES if separated else ())",
            "*CHUNK_CACHES",
            f"{_TESTS}test_untried.py::test_engines_on_gpus_that_were_not_run_are_untried",
        ),
        (
            "if held not in _TRIED_PAIRS_ON_GPUS:",
            "if held is None:",
            f"{_TESTS}test_untried.py::test_engines_on_gpus_that_were_not_run_are_untried",
        ),
        (
            "!= _TRIED_BACKENDS[0]:",
            "is None:",
            f"{_TESTS}test_untried.py::test_engines_on_gpus_that_were_not_run_are_untried",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/hierarchical_cache.py",
        (
            "            self._observer.awaited(FULL, slots)\n",
            "",
            _HIERARCHICAL + "test_records_leave_after_the_checks_and_are_compared_when_the_bytes_are_back",
        ),
        (
            'guarded(self._observer, "host_tier", self._await, copies)',
            "pass",
            _HIERARCHICAL + "test_what_could_not_be_followed_is_awaited",
        ),
        (
            "        self._checks.precede()  # the load",
            "        pass  # the load",
            _HIERARCHICAL + "test_records_leave_after_the_checks_and_are_compared_when_the_bytes_are_back",
        ),
        (
            "        finished.wait()\n",
            "",
            _HIERARCHICAL + "test_records_leave_after_the_checks_and_are_compared_when_the_bytes_are_back",
        ),
        (
            "            self._observer.received(FULL, slots[without])\n",
            "",
            _HIERARCHICAL + "test_a_copy_without_a_record_gets_a_baseline",
        ),
        (
            'guarded(self._observer, "host_tier", self._mark, slots, False)',
            "pass",
            _HIERARCHICAL + "test_a_copy_without_a_record_gets_a_baseline",
        ),
        (
            "        while self._loading:\n",
            "        if self._loading:\n",
            _HIERARCHICAL + "test_loads_that_are_under_way_at_once",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/radix_tree.py",
        (
            "return [len(node.key) for node in nodes]",
            "return None",
            f"{_TESTS}test_radix_tree.py::test_nodes_that_are_on_the_host_alone_have_no_slots",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/host_tier.py",
        (
            'guarded(self._observer, "host_tier", self._await, transfers)',
            "pass",
            _TIER + "test_what_could_not_be_followed_is_awaited",
        ),
        (
            'guarded(self._observer, "host_tier", self._compare_before, transfers)',
            "pass",
            _TIER + "test_records_come_back_with_what_they_were_sent_with",
        ),
        (
            '                    guarded(self._observer, "host_tier", _empty, emptied, slots)\n',
            "                    pass\n",
            _TIER + "test_a_host_slot_that_is_given_anew_has_no_record",
        ),
        (
            "for pool in drafts if pool in self._records]",
            "for pool in ()]",
            _TIER + "test_a_draft_models_records_are_in_the_host_slots_of_the_targets",
        ),
        (
            "*self._packed.get(id(transfer.device_pool), ())",
            "*()",
            _TIER + "test_drafts_that_are_packed_leave_with_the_target_and_come_back_by_themselves",
        ),
        (
            "self._stored[key][index] if",
            "self._stored[key][0] + index if",
            _TIER + "test_drafts_that_are_packed_leave_with_the_target_and_come_back_by_themselves",
        ),
        (
            "            if not old:\n",
            "            if True:\n",
            _TIER + "test_a_page_that_the_storage_had_is_not_the_one_that_was_offered",
        ),
        (
            "0 if found is None else found.cpu()",
            "records[transfer.host_indices.cpu().long()] if found is None else found.cpu()",
            _TIER + "test_where_no_record_could_be_read_the_last_one_is_gone",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/prefix_tree.py",
        (
            "        self._marks[group] = self._freed[group].mark()\n        if held",
            "        if held",
            _TREE + "test_slots_with_their_positions_and_what_precedes_them",
        ),
        (
            "torch.where(previous > 0, previous, -1)",
            "previous",
            _TREE + "test_a_window_group_has_slots_of_its_own",
        ),
        (
            "> LONGEST_WALK_SECONDS:",
            "> 10.0:",
            _TREE + "test_a_walk_that_would_take_too_long_is_refused_before_it_begins",
        ),
        (
            "held * min(self._seconds_per_slot)",
            "held * self._seconds_per_slot[-1]",
            _TREE + "test_one_walk_that_took_long_does_not_end_all_sweeps",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/batch_views.py",
        ("torch.sub(batch.seq_lens, 1, out=prefixes)", "torch.sub(batch.seq_lens, 0, out=prefixes)", _DECODE),
        ("batch.rids != names or ", "", _VIEWS + "test_a_forward_of_other_requests_is_no_view_of_these"),
    ),
    *mutants(
        "canary_obs/engines/sglang/window_slots.py",
        (
            "slots.clamp(-1, self._last)",
            "slots",
            _VIEWS + "test_an_entry_that_leads_nowhere_is_shown_and_does_not_end_the_checks",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/step_hooks.py",
        (
            " and self._scheduler.is_fully_idle()",
            "",
            _HOOKS + "test_a_scheduler_with_parked_work_is_not_idle",
        ),
        (
            "self.launching, self._rests = True, False",
            "self.launching = True",
            _HOOKS + "test_idle_work_waits_until_requests_have_stopped_coming",
        ),
    ),
    *mutants(
        "canary_obs/engines/toolkit/shown_forward.py",
        (
            "            observer.forward_failed(view)\n",
            "",
            _HOOKS + "test_a_forward_that_raises",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/plugin.py",
        (
            "        if load(CanaryConfig).mode is Mode.RAISE:\n            raise\n",
            "        raise\n",
            f"{_TESTS}test_plugin.py::test_no_hook_ends_the_engine",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/versions.py",
        (
            "if device != (tested",
            "if not device and device != (tested",
            _LIMITS + "test_devices_that_nobody_has_tried_a_version_on_are_named",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/limits.py",
        (
            "_SETTINGS | _ON_GPUS)",
            "_SETTINGS)",
            _LIMITS + "test_what_is_not_followed_on_gpus_is_named",
        ),
        (
            'tree != "HiRadixCache":',
            'tree == "":',
            _LIMITS + "test_a_hierarchical_cache_on_gpus_is_the_older_tree",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/stream_hooks.py",
        (
            "            self._streams.forward.join()  # where checks in line are\n",
            "",
            _STREAMS + "test_work_in_order_follows_the_forwards_and_their_checks",
        ),
        (
            "        self._chosen.join_due = True\n        with self._streams.side.after_all:\n",
            "        with self._streams.side.after_all:\n",
            _STREAMS + "test_work_in_order_follows_the_forwards_and_their_checks",
        ),
        (
            "            if self._chosen.join_due:\n                self._chosen.join()\n            late",
            "            late",
            _STREAMS + "test_checks_follow_the_launch_on_a_stream_of_their_own",
        ),
        (
            "        self._streams.side.wait_launched()\n",
            "",
            _STREAMS + "test_checks_follow_the_launch_on_a_stream_of_their_own",
        ),
        (
            "= view is last, (last, view)",
            "= view is last, (None, view)",
            _STREAMS + "test_the_tensors_of_a_view_outlive_the_next_one",
        ),
        (
            "self._kept = self._kept[1], view",
            "self._kept = None, view",
            _STREAMS + "test_the_tensors_of_a_view_outlive_the_next_one",
        ),
        (
            "= view is last, (last, view)",
            "= last is not None, (last, view)",
            _STREAMS + "test_a_batch_that_repeats_is_checked_after_its_forward",
        ),
        (
            "with self._streams.side.after_all:  #",
            "if True:  #",
            _STREAMS + "test_a_view_that_cannot_be_built_stays_the_canarys_affair",
        ),
        (
            "self._next_to_in_a_row > 1",
            "self._next_to_in_a_row",
            _STREAMS + "test_what_repeats_is_compared_while_the_last_forward_runs",
        ),
        (
            "            and self._entries == self._streams.side.entries\n",
            "",
            _STREAMS + "test_not_where_records_may_still_change",
        ),
        (
            "            and self._device_views.repeats(batch, self._requests)\n",
            "",
            _STREAMS + "test_what_repeats_is_compared_while_the_last_forward_runs",
        ),
        (
            "result, self._next_to_in_a_row = run(), 0",
            "result = run()",
            _STREAMS + "test_not_after_a_forward_that_nobody_saw",
        ),
        (
            "        early.join()\n",
            "",
            _STREAMS + "test_what_repeats_is_compared_while_the_last_forward_runs",
        ),
        (
            "        self._streams.early.kept()\n        self._obs",
            "        self._obs",
            _STREAMS + "test_what_a_prompt_shows_is_put_together_after_its_launch",
        ),
        (
            "                if late:\n                    self._keep_late(view)\n",
            "",
            _STREAMS + "test_what_a_prompt_shows_is_put_together_after_its_launch",
        ),
        (
            " or self._chosen.in_line or self._observer.injects)",
            " or self._chosen.in_line)",
            _STREAMS + "test_faults_are_injected_into_values_that_are_there",
        ),
        (
            'guarded(observer, "step_view", views.keep_late)',
            "None",
            _STREAMS + "test_an_early_forward_that_raises_keeps_its_values_first",
        ),
        (
            "            self._observer.forward_failed(view)\n        self._streams.early.kept()\n",
            "        self._streams.early.kept()\n",
            _STREAMS + "test_values_that_could_not_be_kept_are_a_fault",
        ),
        (
            "forward.on_stream if self._chosen.in_line else",
            "",
            _STREAMS + "test_a_device_that_waits_has_its_decodes_checked_in_line",
        ),
        (
            "few_tokens=few",
            "few_tokens=True",
            _STREAMS + "test_a_device_that_waits_has_its_decodes_checked_in_line",
        ),
        ("        self._streams.forward.join()\n", "", _STREAMS + "test_idle_work_follows_the_checks"),
    ),
    *mutants(
        "canary_obs/engines/sglang/device_views.py",
        (
            "slot_table=self._memory.table, out",
            "slot_table=self._table, out",
            _COPIES + "test_what_sglang_writes_for_the_next_batch_does_not_change_this_ones_view",
        ),
        (
            "view.request_ids is not names",
            "len(view.request_ids) != len(names)",
            _COPIES + "test_a_batch_that_repeats_is_shown_as_the_same_view",
        ),
        (
            "self._known, False",
            "True, False",
            _COPIES + "test_a_forward_that_could_not_be_shown_is_followed_by_whole_columns",
        ),
        (
            "own = batch.req_pool_indices, batch.extend_prefix_lens, batch.extend_seq_lens",
            "own = batch.req_pool_indices, batch.extend_prefix_lens, batch.extend_prefix_lens",
            _COPIES + "test_what_a_prompt_shows_may_follow_its_launch",
        ),
        (
            "        self._late, self._late_slots = None, None\n",
            "",
            _COPIES + "test_a_prompt_whose_forward_failed_leaves_nothing_for_the_next_one",
        ),
        (
            "            late, self._late = self._late, None\n            late()",
            "            self._late()",
            _COPIES + "test_tokens_of_a_prompt_that_the_scheduler_lacks_are_missed_after_its_launch",
        ),
        (
            "Known.NEXT_BEFORE if self._chains.late else Known.NEXT",
            "Known.NEXT",
            _COPIES + "test_batches_in_any_order_are_shown_as_without_copies[late-full]",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/ranks.py",
        (
            "(replica * stages + int(parallel.pp_rank)) * width",
            "(stages + int(parallel.pp_rank)) * width",
            _RANKS + "test_every_scheduler_has_a_number_of_its_own",
        ),
        (
            "rank * int(total) // size",
            "0",
            _RANKS + "test_heads_have_the_numbers_that_the_model_has",
        ),
    ),
)
