"""Defects of what is left out of the checks, and of what that does to the groups beside it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_CHANGES = "tests/engines/vllm/test_block_changes.py::"
_LEFT_OUT = "tests/engines/vllm/test_left_out.py::"

GIVEN_UP = mutants(
    "canary_obs/engines/toolkit/block_slots.py",
    (
        "    observer.before_load(group, slots)\n",
        "",
        "tests/engines/toolkit/test_block_slots.py::test_bytes_are_compared_before_their_records_are_emptied",
    ),
    (
        "    observer.invalidated(group, slots)\n",
        "",
        _CHANGES + "test_copies_and_checkpoints_of_states_are_announced_after_blocks_changed_hands",
    ),
)

CHANGES = mutants(
    "canary_obs/engines/vllm/block_changes.py",
    (
        "self.loads = ConnectorLoads(groups, device)",
        "self.loads = ConnectorLoads([group for group in groups if not group.states], device)",
        _CHANGES + "test_a_state_that_a_connector_fills_is_awaited",
    ),
    (
        "                observer.before_load(name, destination)\n",
        "",
        _CHANGES + "test_what_a_copy_of_a_block_is_written_over_is_compared_before",
    ),
    (
        "for number in self._numbers\n",
        "for number in [group.number for group in self._groups]\n",
        _CHANGES + "test_a_block_handed_to_a_group_left_out_ends_the_records_of_the_others",
    ),
    (
        "            found[event.group].update(event.blocks)\n",
        "            pass\n",
        _CHANGES
        + "test_what_a_connector_fills_in_a_group_left_out_ends_records_before_its_request_is_scheduled",
    ),
)

_OWNERS = "tests/engines/vllm/test_block_owners.py::"
_ANY_SEQUENCE = _OWNERS + "test_no_records_are_left_where_another_group_writes"
_UNKNOWN = _OWNERS + "test_a_block_of_which_nothing_is_known_may_have_records_in_every_other_group"
_ZEROED = _OWNERS + "test_zeroed_bytes_end_the_records_of_their_owner"
_MISSED = _OWNERS + "test_after_an_output_that_was_missed_a_block_may_be_anybodys"

OWNERS = mutants(
    "canary_obs/engines/vllm/block_owners.py",
    ("                owners[block] = number\n", "", _ANY_SEQUENCE),
    ("                    lost[owner].add(block)\n", "                    pass\n", _ANY_SEQUENCE),
    ("for number in self._numbers if owner == _ANYBODY else (owner,):", "for number in (owner,):", _ZEROED),
    ("                        lost[other].add(block)\n", "                        pass\n", _UNKNOWN),
    (
        " if empty and len(numbers) > 1 else",
        " if empty else",
        _OWNERS + "test_one_group_alone_has_every_block",
    ),
    (" if empty and len(numbers) > 1 else _ANYBODY", "", _UNKNOWN),
    (" & (owners != _ANYBODY)", "", _MISSED),
    ('        self._owners = array("h", [_ANYBODY]) * len(self._owners)\n', "        pass\n", _MISSED),
)

_FOLLOWER = "tests/engines/vllm/test_follows_requests.py::"
_NEVER_CAME = _FOLLOWER + "test_after_an_output_that_never_came_any_block_may_be_anybodys"

FAILED = mutants(
    "canary_obs/engines/vllm/follows_requests.py",
    ("if number > self._followed + 1 > 0:", "if False:", _NEVER_CAME),
    (
        "self._followed + 1 > 0",
        "self._followed + 1",
        _FOLLOWER + "test_where_every_output_came_all_blocks_have_their_groups",
    ),
    (
        "                self._block_changes.assign(output, output.__dict__.get(EVENTS_ATTRIBUTE))\n",
        "                pass\n",
        _FOLLOWER + "test_who_gets_blocks_is_noted_before_records_become_unknown",
    ),
    (
        "            except Exception:  # noqa: BLE001 - this output is the cause\n"
        "                self._block_changes.owners.forget()\n",
        "            except Exception:  # noqa: BLE001 - this output is the cause\n                pass\n",
        _FOLLOWER + "test_after_an_output_that_could_not_be_noted_any_block_may_be_anybodys",
    ),
    (
        "        self._followed = self._forwards.number  # of",
        "        # of",
        _FOLLOWER + "test_an_output_that_came_past_the_worker_was_followed",
    ),
    (
        " or self._followed != self._forwards.number:",
        ":",
        _FOLLOWER + "test_nothing_is_said_while_an_output_is_on_its_way",
    ),
)

ASSIGNED = mutants(
    "canary_obs/engines/vllm/block_changes.py",
    (
        "        self.states.miss(output)\n",
        "",
        _CHANGES + "test_who_gets_blocks_is_noted_of_an_output_that_failed_too",
    ),
)

_EMPTIED = "tests/runtime/device/test_state.py::" + (
    "test_slots_whose_bytes_another_group_has_are_emptied_as_all_become_unknown"
)

UNKNOWN = mutants(
    "canary_obs/runtime/device/state.py",
    ("            self.forget(uploaded(others, self.memory.device))\n", "            pass\n", _EMPTIED),
)

LEFT_OUT = mutants(
    "canary_obs/engines/vllm/left_out.py",
    (
        "if reasons and not found:",
        "if False:",
        _LEFT_OUT + "test_only_an_engine_of_which_nothing_is_left_is_refused",
    ),
)

_RANKS = "tests/engines/vllm/test_context_parallel.py::"
RANKS = mutants(
    "canary_obs/engines/vllm/context_parallel.py",
    (
        'any(getattr(spec, "dcp_sharded", True) for',
        'any(getattr(spec, "dcp_sharded", False) for',
        _RANKS + "test_tokens_are_spread_as_the_block_tables_say",
    ),
    (
        "size == 1 or keeps_states(specs)",
        "size == 1",
        _RANKS + "test_a_group_that_each_rank_keeps_whole_is_not_spread",
    ),
    ("if ranks != size or", "if", _RANKS + "test_block_tables_that_say_something_else_are_refused"),
    (
        'getattr(runner.vllm_config, "kv_transfer_config", None) is not None',
        "False",
        _RANKS + "test_connectors_are_refused_where_tokens_are_spread",
    ),
    ("sharding.ranks > 1 and not plain", "False", _RANKS + "test_only_plain_attention_is_spread"),
    ("page_size % sharding.interleave", "False", _RANKS + "test_only_plain_attention_is_spread"),
    (
        "if find(runner, name, page_size, number) is not None:",
        "if False:",
        _RANKS + "test_packed_rows_are_refused_where_they_are_spread",
    ),
)

_SHARDED = "tests/engines/vllm/test_sharded_slots.py::test_"
SHARDED = mutants(
    "canary_obs/engines/vllm/sharded_slots.py",
    ("right=True", "right=False", _SHARDED + "each_rank_shows_the_slots_of_all_tokens"),
    ("run * (ranks - 1)", "run * ranks", _SHARDED + "each_rank_shows_the_slots_of_all_tokens"),
    (".add_(sharding.first)", "", _SHARDED + "each_rank_shows_the_slots_of_all_tokens"),
    (
        "masked_fill_(flags, -1)",
        "masked_fill_(flags, 0)",
        _SHARDED + "a_token_of_this_rank_is_shown_where_vllm_writes_it",
    ),
    (
        "where(flags, local, slots",
        "where(flags, slots, slots",
        _SHARDED + "a_token_of_this_rank_is_shown_where_vllm_writes_it",
    ),
    (".clamp_(0, width - 1)", "", _SHARDED + "positions_beyond_the_table_are_no_error"),
    (".clamp_(max=height - 1)", "", _SHARDED + "padding_after_the_last_request_is_no_error"),
)

_HELD = "tests/kernels/test_sharding.py::test_"
HELD = mutants(
    "kernels/canary_kernels/fingerprint/reference.py",
    (
        "hashes[held] = _hash(",
        "hashes[: len(own)] = _hash(",
        _HELD + "a_rank_hashes_its_own_slots_and_nothing_of_others[2-1-Backend.TORCH]",
    ),
)
HELD += mutants(
    "kernels/canary_kernels/layer_write/reference.py",
    (
        " & held_slots(layer.sharding, listed)",
        "",
        _HELD + "layers_are_looked_at_in_own_slots_alone[Backend.TORCH]",
    ),
)

_ENTRIES = "tests/engines/vllm/test_compressed.py::"
ENTRIES = mutants(
    "canary_obs/engines/vllm/compressed.py",
    (
        "return 1 if found == -1 else found",
        "return 1",
        _ENTRIES + "test_slots_that_are_not_tokens_are_not_taken_for_them",
    ),
    (
        "[found[kind] for kind in sorted(found)]",
        "list(found.values())",
        _ENTRIES + "test_layers_of_one_group_are_told_apart",
    ),
    (
        '"a KV connector": getattr',
        '"a KV connector": None and getattr',
        _ENTRIES + "test_entries_that_cannot_be_followed_are_left_out",
    ),
)

_STEPS = "tests/engines/vllm/test_entry_steps.py::"
STEPS = mutants(
    "canary_obs/engines/vllm/entry_steps.py",
    (
        "(entries + 1) * ratio - 1",
        "entries * ratio",
        _STEPS + "test_an_entry_is_complete_with_the_last_token_of_its_run",
    ),
    (
        "if start <= first[place]:",
        "if True:",
        _STEPS + "test_a_request_that_comes_back_is_computed_anew",
    ),
    (
        "batch.tokens[place][before - before % ratio : before]",
        "batch.tokens[place][before : before + before % ratio]",
        _STEPS + "test_chunks_write_what_one_forward_writes",
    ),
)

_WRITES = "tests/engines/vllm/test_compressors.py::"
WRITES = mutants(
    "canary_obs/engines/vllm/compressors.py",
    (
        "        cache.kv_cache = self._scratch\n",
        "",
        _WRITES + "test_an_entry_is_its_elements_and_its_scales",
    ),
    ("if len(found) != 1:", "if not found:", _WRITES + "test_what_cannot_be_confirmed_is_left_out"),
)

_STATES = "tests/engines/vllm/test_states.py::"
STATES = mutants(
    "canary_obs/engines/vllm/states.py",
    (
        "            if moves:\n                changes.sources",
        "            if False:\n                changes.sources",
        _STATES + "test_a_state_moves_where_its_next_token_lies_in_another_block",
    ),
    (
        "if destination - 1 > source and blocks",
        "if destination > source and blocks",
        _STATES + "test_a_state_from_the_prefix_cache_is_copied_to_the_requests_own_block",
    ),
    (
        "            or requests != self._running\n",
        "",
        _STATES + "test_what_is_not_the_same_decode_is_followed",
    ),
    (
        "or adoptions != self._adoptions",
        "",
        _STATES + "test_records_that_were_declared_unknown_have_the_next_forward_shown",
    ),
    (
        "if tokens > 1 or (size is not None and not end % size):",
        "if tokens > 1:",
        _STATES + "test_a_state_at_the_end_of_a_block_is_left_with_a_record_and_copied_with_it",
    ),
    (
        "changes.rested.append(open_states.pop(request))",
        "open_states.pop(request)",
        _STATES + "test_what_a_prompt_leaves_and_what_rests_meanwhile_has_a_record",
    ),
    (
        "return min(self.left_out, (counted - self._counted_from) * (every - 1) // every)",
        "return self.left_out",
        _STATES + "test_no_more_are_left_out_than_the_interval_allows_of_those_that_were_counted_elsewhere",
    ),
    (
        "out=self._ends[:count]).sub_(1)",
        "out=self._ends[:count])",
        _STATES + "test_each_request_rewrites_the_state_in_the_block_of_its_last_token",
    ),
    (
        "self._slots[group.number].copy_(given)",
        "self._slots[group.number].copy_(self._tables[group.number][:, 0])",
        _STATES + "test_a_record_goes_where_the_scheduler_says_and_is_looked_for_where_the_table_leads",
    ),
    (
        "if self._changes != self._blocks.changes or self._requests != requests:",
        "if self._changes != self._blocks.changes:",
        _STATES + "test_a_record_goes_where_the_scheduler_says_and_is_looked_for_where_the_table_leads",
    ),
    (
        "if self._changes != self._blocks.changes or self._requests != requests:",
        "if self._requests != requests:",
        _STATES + "test_each_request_rewrites_the_state_in_the_block_of_its_last_token",
    ),
    (
        "if self._changes != self._blocks.changes or self._requests != requests:",
        "if True:",
        _STATES + "test_nothing_is_sent_to_the_device_while_requests_stay_in_their_blocks",
    ),
    (
        "np.where((rows[3:, :count] == _UNKNOWN).any(0), -1, 1)",
        "1",
        _STATES + "test_nothing_is_looked_for_of_a_request_whose_blocks_are_not_known",
    ),
)

_SCALES = "tests/engines/vllm/test_scales.py::"
SCALES = mutants(
    "canary_obs/engines/vllm/scales.py",
    (
        "        self.refresh()\n        if any",
        "        if any",
        _SCALES + "test_what_python_holds_is_taken_up_before_each_forward",
    ),
)

_INDEX_KEYS = "tests/engines/vllm/test_index_keys.py::"
INDEX_KEYS = mutants(
    "canary_obs/kv_locations/split_pages.py",
    (
        "if elsewhere or not own",
        "if False and not own",
        _INDEX_KEYS + "test_keys_that_lie_elsewhere_are_left_out",
    ),
    (
        "            probed.copy_(saved)",
        "            pass",
        _INDEX_KEYS + "test_keys_that_lie_elsewhere_are_left_out",
    ),
)

_PACKED = "tests/engines/vllm/test_packed_windows.py::"
PACKED = mutants(
    "canary_obs/engines/vllm/packed_windows.py",
    ("if layer.bounded_replay:", "if False:", _PACKED + "test_windows_that_are_computed_again_are_left_out"),
    ("if len(writers) != 1:", "if not writers:", _PACKED + "test_what_cannot_be_confirmed_is_left_out"),
)

SLOTS_OF_RANKS = RANKS + SHARDED + HELD
ALL = (
    FAILED
    + ASSIGNED
    + GIVEN_UP
    + CHANGES
    + OWNERS
    + UNKNOWN
    + LEFT_OUT
    + SLOTS_OF_RANKS
    + ENTRIES
    + STEPS
    + WRITES
    + STATES
)
ALL += SCALES + INDEX_KEYS + PACKED
