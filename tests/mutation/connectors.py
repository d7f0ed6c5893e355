"""Defects of following what KV connectors load; killed by tests without an engine."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_LOADS = "tests/engines/vllm/test_connector_loads.py::"

_COPIED = _LOADS + "test_when_a_load_is_copied_is_said_if_it_is_known_of_all_of_it"
LOADS = mutants(
    "canary_obs/engines/vllm/connector_loads.py",
    ("or len(known) < len(ends)", "", _COPIED),
    ("or not bool((expected.filled > 0).all())", "", _COPIED),
    ("ends, self.copies.ends = self.copies.ends, []", "ends = self.copies.ends", _COPIED),
    (
        "return tokens.get() if isinstance(tokens, Later) else tokens",
        "return tokens.get()",
        _LOADS + "test_tokens_of_a_load_come_as_the_scheduler_sends_them[to another process-waits]",
    ),
    (
        "self._due.append((request, loads, tokens.get(request)))",
        "self._due.append((request, loads, _given(tokens.get(request))))",
        _LOADS + "test_tokens_of_a_load_come_as_the_scheduler_sends_them[in this process-waits]",
    ),
    (
        "if other.number != group.number:",
        "if other is not group:",
        _LOADS + "test_layers_of_a_draft_have_bytes_of_their_own_in_the_same_blocks",
    ),
    (
        "        self._compare_before(started, observer)\n",
        "",
        _LOADS + "test_a_load_that_a_request_waits_for_begins_once_its_copies_were_submitted",
    ),
    (
        "        self._compare_before(blocks, observer)\n",
        "",
        _LOADS + "test_blocks_that_are_written_again_arrive_with_the_step",
    ),
    (
        "for request in self._waiting.keys() & computed.keys():",
        "for request in list(self._waiting):",
        _LOADS + "test_a_waiting_request_gets_no_baseline_before_it_is_scheduled",
    ),
    (
        "if self._waiting.pop(request, None) is not None:",
        "if request not in self._waiting:",
        _LOADS + "test_a_request_that_ended_is_forgotten",
    ),
    (
        "if own := [load for load in loads if load.group == group.number]:",
        "if own := [load for load in loads if load.group != group.number]:",
        _LOADS + "test_other_groups_lose_what_a_load_overwrites",
    ),
    (
        "                self._open.add(request)\n                self._due.append",
        "                self._open.add(request)\n                list().append",
        _LOADS + "test_a_load_that_a_request_waits_for_begins_once_its_copies_were_submitted",
    ),
    (
        "        self.begin_due(observer)\n        self.failed",
        "        self.failed",
        _LOADS + "test_a_load_that_a_request_waits_for_begins_once_its_copies_were_submitted",
    ),
    (
        "        self.begin_due(observer)\n        for request in self.landing",
        "        for request in self.landing",
        _LOADS + "test_a_load_that_a_request_waits_for_begins_once_its_copies_were_submitted",
    ),
    (
        "and computed is None and not self.failed and known.puts == self.copies.puts:",
        "and computed is None and known.puts == self.copies.puts:",
        _LOADS + "test_what_will_have_arrived_is_said_while_the_copies_are_made",
    ),
    (
        "and not self.failed and known.puts == self.copies.puts:",
        "and not self.failed:",
        _LOADS + "test_what_will_have_arrived_is_said_while_the_copies_are_made",
    ),
    (
        "        self.landing = {}\n        self.loaded_from",
        "        self.loaded_from",
        _LOADS + "test_a_step_that_failed_reports_no_arrival",
    ),
    (
        "self.copies.forget(group.view.name, load.blocks)",
        "pass",
        _LOADS + "test_what_is_known_of_a_load_that_never_arrived_is_forgotten",
    ),
    (
        "observer.invalidated(other.view.name, self._slots_of(rows.blocks.tolist(), other))",
        "pass",
        _LOADS + "test_other_groups_lose_what_a_load_overwrites",
    ),
    (
        "self._slots_of(rows.blocks.tolist(), other)",
        "self._slots_of(rows.blocks.tolist(), group)",
        _LOADS + "test_other_groups_lose_what_lies_in_the_same_blocks_also_with_others_of_their_own_size",
    ),
    (
        "if request in self._open and request in lost:",
        "if request in lost and not finished:",
        _LOADS + "test_a_load_that_is_reported_as_failed_leaves_nothing",
    ),
    (
        "del self._waiting[request]  #",
        "pass  #",
        _LOADS + "test_a_load_that_is_reported_as_failed_leaves_nothing",
    ),
    (
        "self.failed.update(blocks)",
        "self.failed.update(())",
        _LOADS + "test_blocks_that_could_not_be_loaded_must_be_written",
    ),
    (
        "self._end(request, self._waiting[request], None, observer)",
        "()",
        _LOADS + "test_a_reported_load_is_judged_before_its_request_is_scheduled",
    ),
)

_STREAM = "tests/engines/toolkit/test_check_stream.py::"
STREAM = mutants(
    "canary_obs/engines/toolkit/check_stream.py",
    (
        "self._steps, self._device_waits = 0, not",
        "self._device_waits = not",
        _STREAM + "test_checks_run_aside_until_the_device_is_seen_to_wait",
    ),
    ("if not few_tokens:", "if False:", _STREAM + "test_a_long_forward_is_checked_aside"),
    (
        "self._steps, self._device_waits, self.in_line = STEPS_PER_QUERY - 2, False, False",
        "self.in_line = False",
        _STREAM + "test_the_second_step_after_a_long_forward_asks_anew",
    ),
    (
        "self.in_line = self._device_waits\n",
        "self.in_line = True\n",
        _STREAM + "test_they_run_aside_again_once_it_is_busy",
    ),
    ("        self.join_due = True\n", "", _STREAM + "test_a_long_forward_is_checked_aside"),
    (
        "        self.join_due = False\n",
        "",
        _STREAM + "test_a_second_entry_of_a_step_is_joined_by_the_next",
    ),
)

_EARLY = "tests/engines/toolkit/test_early_stream.py::"
_WAITS = _EARLY + "test_it_waits_for_the_scheduler_and_the_checks_before_the_last"
EARLY = mutants(
    "canary_obs/engines/toolkit/early_stream.py",
    ("            self._stream.wait_event(self._scheduled)\n", "", _WAITS),
    ("self._stream.wait_event(self._before)", "self._stream.wait_event(self._newest)", _WAITS),
    ("self._newest, self._before = self._before, self._newest", "pass", _WAITS),
    (
        "            self._scheduler.wait(self._kept)\n",
        "",
        _EARLY + "test_the_scheduler_waits_for_what_was_kept",
    ),
    ("if self.stream_id not in theirs:", "if True:", _EARLY + "test_it_is_none_of_the_engines_streams"),
)

_STEPS = "tests/engines/vllm/test_step_hooks.py::"
ENDS = mutants(
    "canary_obs/engines/vllm/step_hooks.py",
    (
        "if not self.late_reports():",
        "if True:",
        _STEPS + "test_a_step_whose_connector_reports_after_sampling_ends_then",
    ),
    (
        "self._arrivals_due = late and self.late_reports()",
        "self._arrivals_due = False",
        _STEPS + "test_with_drafts_only_what_has_arrived_is_judged_after_sampling",
    ),
    (
        "                self._arrivals_due = False\n                self.output = scheduler_output\n",
        "                self.output = scheduler_output\n",
        _STEPS + "test_what_a_step_has_loaded_that_was_not_sampled_is_not_judged",
    ),
)

BLOCKS = mutants(
    "canary_obs/engines/vllm/loaded_blocks.py",
    (
        "        end = np.minimum(end, before)\n",
        "",
        _LOADS + "test_what_the_forward_writes_gets_no_baseline",
    ),
    (
        "// group.slot_tokens",
        "",
        _LOADS + "test_a_state_that_the_forward_goes_on_with_is_not_taken_for_loaded",
    ),
    (
        "np.zeros_like(blocks), np.ones_like(blocks))",
        "np.ones_like(blocks), np.ones_like(blocks))",
        _LOADS + "test_a_state_has_arrived_when_its_load_is_reported",
    ),
    (
        "(rows.first > 0) | written",
        "written",
        _LOADS + "test_blocks_are_compared_with_copies_that_nothing_else_was_written_into",
    ),
    (
        "sent.filled > (size if computed is None else end)",
        "sent.filled > size",
        _LOADS + "test_blocks_are_compared_with_copies_that_nothing_else_was_written_into",
    ),
    ("if 0 in load.blocks:", "if False:", _LOADS + "test_blocks_that_a_window_has_left_are_not_loaded"),
)

_JUDGED = "tests/runtime/test_loads.py::"
_HASHED = _JUDGED + "test_what_was_copied_is_hashed_before_it_is_reported_and_judged_then"
JUDGED = mutants(
    "canary_obs/runtime/loads.py",
    ("expected, early = _expected(", "expected, _ = _expected(", _HASHED),
    ("if blocks.copied and checked", "if False and checked", _HASHED),
    (
        "and not self._last.query():",
        "and False:",
        _JUDGED + "test_detach_waits_for_what_still_reads_the_engines_memory",
    ),
    (
        "            group.forget(slots)\n",
        "",
        _JUDGED + "test_slots_of_a_failed_load_must_be_written_before_they_are_read",
    ),
    (
        "expected is None or expected.arrived is not arrived:",
        "expected is None:",
        _JUDGED + "test_what_was_said_beforehand_of_a_load_is_taken_if_all_of_it_arrives",
    ),
    (
        "self._state.owed.compared(group.index, layout.Phase.HEAD, expected.compared)",
        "pass",
        _JUDGED + "test_every_slot_of_a_load_is_accounted_for",
    ),
    (
        "        if checked:\n            self._state.tick()",
        "        if checked and begun.identities is not None:\n            self._state.tick()",
        _JUDGED + "test_a_load_without_tokens_is_compared_with_what_was_sent_and_gets_a_baseline",
    ),
)
_SPLIT = "tests/runtime/test_transfer.py::test_folds_of_shares_sum_to_the_whole_and_locate_damage_by_heads"
FOLDS = mutants(
    "canary_obs/runtime/transfer.py",
    (
        "uploaded(word_keys(0, size), device)",
        "torch.ones(size, dtype=torch.int64, device=device)",
        _JUDGED + "test_slots_exchanged_within_a_block_are_found",
    ),
    (
        "keys, baselines=baselines)",
        "keys)",
        _JUDGED + "test_folds_are_of_records_not_of_bytes",
    ),
    ("folds[-1, :, 1:] -= part", "pass", _SPLIT),
    ("hashes.view(*slots.shape, 2) * keys[:, None]", "hashes.view(*slots.shape, 2)", _SPLIT),
)

_COPIES = "tests/engines/vllm/test_sent_copies.py::"
COPIES = mutants(
    "canary_obs/engines/vllm/sent_copies.py",
    ("if 0 < len(folds) <= MOST:", "if False:", _COPIES + "test_a_block_may_have_several_copies_or_none"),
    (
        "            if table is not None:\n                grown[:held] = table\n",
        "",
        _COPIES + "test_what_is_known_stays_when_a_higher_block_is_put",
    ),
    (
        "        table[blocks, _Column.KNOWN : _Column.FOLDS] = 0",
        "        pass",
        _COPIES + "test_what_was_taken_is_known_no_more",
    ),
    (
        "self._said.get(group, 0) + count - before",
        "self._said.get(group, 0) + 1 - before",
        _COPIES + "test_what_is_forgotten_is_known_no_more",
    ),
    (
        "np.unique(blocks[rows[:, _Column.KNOWN] == 1]).size",
        "blocks.size",
        _COPIES + "test_a_block_that_is_named_twice_is_known_until_it_is_taken",
    ),
    (
        "if len(peers) == 1 else",
        "if peers else",
        _COPIES + "test_several_peers_are_none",
    ),
)

_STORED = "tests/copy_records/test_stored_copies.py::"
STORED = mutants(
    "canary_obs/copy_records/stored_copies.py",
    (
        "if not filed and os.path.exists(path):",
        "if False:",
        _STORED + "test_a_file_that_is_there_already_is_somebody_elses",
    ),
    (
        "                known.folds[place] = None\n            else:",
        "                pass\n            else:",
        _STORED + "test_a_copy_of_which_nothing_is_known_makes_its_key_unknown",
    ),
    ("if len(known) > MOST:", "if False:", _STORED + "test_more_copies_than_are_kept_are_none"),
    (
        "record_file is None or record_file.formats != self._formats():",
        "record_file is None:",
        _STORED + "test_records_of_another_format_are_not_compared",
    ),
)
RECORD_FILES = mutants(
    "canary_obs/copy_records/record_files.py",
    (
        "if not hmac.compare_digest(data[len(MAGIC) : head], self._seal(data[head:])):",
        "if False:",
        _STORED + "test_with_a_key_only_its_holders_are_believed",
    ),
    ("if record_file.key != key:", "if False:", _STORED + "test_what_cannot_be_believed_is_refused"),
    ("self._merged(path, record_file))", "record_file)", _STORED + "test_records_of_two_writers_are_joined"),
    (
        "owner.st_mode & _WRITABLE_BY_OTHERS):",
        "owner.st_mode < 0):",
        _STORED + "test_what_cannot_be_believed_is_refused",
    ),
)
_OFFLOADS = "tests/engines/vllm/test_offload_records.py::"
OFFLOADS = mutants(
    "canary_obs/engines/vllm/offload_records.py",
    (
        'getattr(transfers[-1], "job_id", None) == job',
        "True",
        _OFFLOADS + "test_after_which_event_a_load_is_copied_is_known_where_the_worker_keeps_it",
    ),
    (
        "existed=named.key in existed)",
        "existed=os.path.exists(named.path))",
        _OFFLOADS + "test_a_file_that_is_written_before_the_records_are_there_has_a_record_file[False]",
    ),
    (
        "slots, baselines=group.states)",
        "slots)",
        _OFFLOADS + "test_what_is_stored_of_states_is_one_record_each",
    ),
    (
        "np.arange(int(size)) + first % per_chunk",
        "np.arange(int(size))",
        _OFFLOADS + "test_blocks_and_chunks_are_paired_as_vllm_copies_them",
    ),
    (
        "(k, v) if whole else None",
        "(k, v)",
        _OFFLOADS + "test_records_that_are_not_complete_vouch_for_nothing",
    ),
    (
        '"" if any(each.path for each in named) else HOST_PEER',
        '""',
        _OFFLOADS + "test_a_load_is_compared_with_what_its_key_was_stored_as",
    ),
    (
        "submitted = original(job_id, src_spec, dst_spec, *args, **kwargs)\n"
        '            guarded(self._observer, "announce", self._load, job_id, dst_spec, src_spec)',
        'guarded(self._observer, "announce", self._load, job_id, dst_spec, src_spec)\n'
        "            submitted = original(job_id, src_spec, dst_spec, *args, **kwargs)",
        _OFFLOADS + "test_no_copy_waits_for_its_records",
    ),
    (
        "        self._read_stores()\n        self._take()\n\n    def _read_stores",
        "        self._take()\n\n    def _read_stores",
        _OFFLOADS + "test_no_copy_waits_for_its_records",
    ),
    (
        "self._jobs.pop(job, None)",
        "next(reversed(self._jobs.values()), None)",
        _OFFLOADS + "test_a_load_is_compared_with_what_its_key_was_stored_as",
    ),
)
KEYS = mutants(
    "canary_obs/engines/vllm/offload_keys.py",
    (
        "len(tiers) <= 1 and all(",
        "len(tiers) <= 1 or all(",
        _OFFLOADS + "test_what_other_tiers_hold_is_not_known",
    ),
    (
        "            setattr(manager, _KEYS, {})\n        found.append",
        "            pass\n        found.append",
        _OFFLOADS + "test_keys_travel_with_the_jobs_of_their_step",
    ),
)

_SENT = "tests/copy_records/test_sent_records.py::"
SENT = mutants(
    "canary_obs/copy_records/sent_records.py",
    (
        "if (records.engine, records.request) != (engine, request):",
        "if False:",
        _SENT + "test_sealed_records_open_for_their_request_alone",
    ),
    (
        "if not hmac.compare_digest(data[len(MAGIC) : head], self._sealed(data[head:])):",
        "if False:",
        _SENT + "test_every_changed_byte_is_refused",
    ),
    (
        "if not self._key and not _is_local(host):",
        "if False:",
        _SENT + "test_without_a_key_only_this_host_is_believed",
    ),
    (
        "return sums if found == wanted else []",
        "return sums",
        _SENT + "test_shares_that_do_not_make_it_up_say_nothing",
    ),
    ("or parts <= found:", "or False:", _SENT + "test_replicas_count_once"),
)
_RECEIVED = "tests/engines/vllm/test_received_blocks.py::"
RECEIVED = mutants(
    "canary_obs/engines/vllm/received_blocks.py",
    (
        "folds[first:] if",
        "folds[: len(blocks)] if",
        _RECEIVED + "test_of_a_cached_prefix_nothing_is_received",
    ),
    (
        "if records is not None and filled:",
        "if False:",
        _RECEIVED + "test_shares_of_two_ranks_make_up_what_one_receives",
    ),
    (
        "expected is not None and request not in failed:",
        "expected is not None:",
        _RECEIVED + "test_of_a_receive_that_failed_nothing_is_kept",
    ),
    (
        "self._ended = partial(self._found_or_nothing, folds)",
        "pass",
        _RECEIVED + "test_records_may_be_complete_before_the_connector_is_asked",
    ),
    (
        "getattr(output, SENT_ATTRIBUTE, ()), None, None",
        "getattr(output, SENT_ATTRIBUTE, ()), None, self._ended",
        _RECEIVED + "test_records_may_be_complete_before_the_connector_is_asked",
    ),
    (
        "slots, baselines=group.states, shares=shares)",
        "slots, shares=shares)",
        _RECEIVED + "test_a_state_is_sent_whole_wherever_the_prompt_ends",
    ),
    (
        "stop = len(blocks) if group.states else sent.tokens",
        "stop = len(blocks) - 1 if group.states else sent.tokens",
        _RECEIVED + "test_a_state_is_sent_whole_wherever_the_prompt_ends",
    ),
    (
        "slots, baselines=group.states, shares=shares)",
        "slots, baselines=group.states)",
        _RECEIVED + "test_a_rank_that_holds_some_of_the_heads_takes_its_share_of_them",
    ),
    (
        "(int(each.layer), int(each.part), heads.start, len(heads))",
        "(int(each.layer), int(each.part), int(each.head_start), len(heads))",
        _RECEIVED + "test_a_rank_that_holds_some_of_the_heads_takes_its_share_of_them",
    ),
)

_READERS = "tests/engines/vllm/test_transfer_readers.py::"
READERS = mutants(
    "canary_obs/engines/vllm/transfer_readers.py",
    (
        "known = self._known | {ranks}",
        "known = {ranks}",
        _READERS + "test_the_heads_are_split_for_all_engines_that_read",
    ),
    (
        "ranks.isdigit() and not each.startswith(_HEARTBEAT)",
        "ranks.isdigit()",
        _READERS + "test_nixl_says_how_many_ranks_have_read",
    ),
    (
        "self.note(int(ranks) // own)",
        "self.note(int(ranks))",
        _READERS + "test_nixl_says_how_many_ranks_have_read",
    ),
    (
        "            self.shares = shares\n",
        "            pass\n",
        _READERS + "test_the_heads_are_split_for_all_engines_that_read",
    ),
)

SENDS = mutants(
    "canary_obs/engines/vllm/sent_blocks.py",
    (
        "known.update(of_step)",
        "known.update({**of_step, **known})",
        _RECEIVED + "test_a_prompt_that_was_computed_again_elsewhere_is_sent_as_it_lies_now",
    ),
    (
        "computed < request.num_prompt_tokens <= computed + count",
        "request.num_prompt_tokens <= computed + count",
        _RECEIVED + "test_a_prompt_that_has_ended_is_not_taken_again_with_each_token",
    ),
)

_DISKS = "tests/engines/vllm/test_disk_records.py::"
DISKS = mutants(
    "canary_obs/engines/vllm/disk_records.py",
    (
        "self.stores.begin_forward()",
        "pass",
        _DISKS + "test_a_forward_that_failed_has_stored_nothing",
    ),
    (
        "Store(named, blocks, os.path.exists(folder))",
        "Store(named, blocks, False)",
        _DISKS + "test_a_folder_that_was_there_already_is_somebody_elses",
    ),
    (
        "known.get((name, number))",
        "known.get((name, 0))",
        _DISKS + "test_a_load_is_compared_with_what_its_folder_was_stored_as",
    ),
)

_REPORTS = "tests/engines/vllm/test_connector_reports.py::"

REPORTS = mutants(
    "canary_obs/engines/vllm/connector_reports.py",
    (
        "self._loads.reported(finished, failed, blocks, self._observer)",
        "self._loads.reported(finished, (), blocks, self._observer)",
        _REPORTS + "test_what_arrived_and_what_failed_is_reported_with_the_blocks",
    ),
    (
        'guarded(self._observer, "announce", self._report, results, blocks or ())',
        "self._report(results, blocks or ())",
        _REPORTS + "test_a_fault_is_counted_and_the_runner_gets_its_answer",
    ),
)

ALL = (
    *REPORTS,
    *SENDS,
    *DISKS,
    *COPIES,
    *SENT,
    *RECEIVED,
    *STORED,
    *RECORD_FILES,
    *OFFLOADS,
    *KEYS,
    *LOADS,
    *STREAM,
    *EARLY,
    *ENDS,
    *BLOCKS,
    *JUDGED,
    *FOLDS,
)
