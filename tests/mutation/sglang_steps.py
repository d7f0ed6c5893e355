"""Seeded defects of what SGLang's adapter does in a step on a GPU, and of sweeps there."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/engines/sglang/"
_WALK, _TIME = _TESTS + "test_node_walk.py::", "tests/runtime/sweep/test_sweep_time.py::"
_ROOM = _TIME + "test_a_chunk_that_the_budget_has_no_room_for_is_left_to_the_next_step"
_DECODE = "tests/kernels/test_decode.py::"
_COPIES = _TESTS + "test_device_views.py::"
_WINDOWS = _DECODE + "test_slots_of_a_window_group"
_LENGTHS = _DECODE + "test_lengths_that_the_table_cannot_have"
_DRAFTS = _DECODE + "test_drafts_that_the_lengths_do_not_have"
_SHOWN = _COPIES + "test_drafts_are_shown_of_copies"
_DEVICE_STATES = _TESTS + "test_device_states.py::"
_WHERE_LAYERS_LOOK = "test_a_record_goes_where_the_scheduler_says_and_is_read_where_the_layers_look"
_WITHOUT_STATES = "test_of_forwards_that_decode_the_same_requests_some_are_shown_without_their_states"
_OF_ITS_OWN = "test_a_prompt_leaves_the_state_of_its_last_whole_chunk_which_is_a_forward_of_its_own"

ALL = (
    *mutants(
        "kernels/canary_kernels/decode/reference.py",
        ("min(max(length, 0), width)", "max(length, 0) % width", _LENGTHS),
        (" if 0 <= row < num_rows else -1", "", _LENGTHS),
        ("    lengths += 1\n", "", _DECODE + "test_a_token_more_of_each"),
        ("(slots >= 0) & (slots <= last)", "slots <= last", _WINDOWS),
        ("np.where(written > 0, written, -1)", "written", _WINDOWS),
        (" + step.ahead", "", _DRAFTS),
        ("memory.window_slots.numpy()[:added]", "memory.window_slots.numpy()[:count]", _DRAFTS),
    ),
    *mutants(
        "kernels/canary_kernels/decode/kernel.py",
        ("tl.where(known, stop, 0)", "stop", _LENGTHS),
        ("tl.minimum(length, width)", "length", _LENGTHS),
        (
            "tl.where((of >= 0) & (of <= last_slot), of, last_slot)",
            "tl.where(of >= 0, of, last_slot)",
            _WINDOWS,
        ),
        ("tl.where(kept > 0, kept, -1)", "kept", _WINDOWS),
        (".to(tl.int64) + ahead", ".to(tl.int64)", _DRAFTS),
        ("length - added)", "length - 1)", _DRAFTS),
        ("range(place * added, place * added + added)", "range(place, place + 1)", _DRAFTS),
        ("own_tokens + tokens_stride", "own_tokens + stride", _DRAFTS),
        ("state == NEXT, chain", "state != NEXT, chain", _DECODE + "test_a_token_more_of_each"),
        (
            "tl.num_programs(1) * BLOCK",
            "tl.num_programs(1) * BLOCK * 2",
            _DECODE + "test_a_batch_that_decodes_for_many_steps",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/device_views.py",
        (
            "apart = self._windows is None and self.states is None",
            "apart = self.states is None",
            _TESTS + "test_device_views.py::test_no_decode_is_compared_early_where_slots_leave_a_window",
        ),
        (
            "apart = self._windows is None and self.states is None",
            "apart = self._windows is None",
            _TESTS + "test_device_views.py::test_some_decodes_are_shown_without_their_states",
        ),
        (
            "view = self._without_states or view",
            "pass",
            _TESTS + "test_device_views.py::test_some_decodes_are_shown_without_their_states",
        ),
        (
            "self._memory.windows[:count, :width] = self._windows[own]",
            "pass",
            _COPIES + "test_what_sglang_writes_for_the_next_batch_does_not_change_this_ones_view",
        ),
        ("self._mapping, width, width,", "self._mapping, width, 0,", _SHOWN),
        ("None if self._drafts else columns.digests", "columns.digests", _SHOWN),
        ("self._chains.known(requests)", "(0, 0, 0)", _SHOWN),
        ("or view.input_ids is not columns.tokens[0]", "", _SHOWN),
    ),
    *mutants(
        "canary_obs/engines/sglang/stream_hooks.py",
        (
            " or mode.is_target_verify()",
            "",
            _TESTS + "test_stream_hooks.py::test_drafts_are_shown_before_their_launch",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/request_chains.py",
        (
            " or (totals < last.stops).any()",
            "",
            _TESTS + "test_request_chains.py::test_all_that_is_known_whatever_was_accepted",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/limits.py",
        (
            "_WITH_DRAFTS_ON_GPUS if on_gpu else _WITH_DRAFTS",
            "_WITH_DRAFTS",
            _TESTS + "test_limits.py::test_chains_of_drafts_pass_on_gpus",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/component_tree.py",
        (
            "[len(node.key) for node in nodes]",
            "[slots.numel() for slots in self._slots(SWA, nodes)]",
            _TESTS + "test_component_tree.py::test_slots_of_windows_follow_none_that_has_left_its_window",
        ),
        (
            "component_data[_COMPONENTS[group]].lock_ref",
            "component_data[0].lock_ref",
            _TESTS + "test_component_tree.py::test_each_group_has_locks_of_its_own",
        ),
        (
            "follow_none = [-1] * len(nodes)",
            "follow_none = parents",
            _TESTS + "test_component_tree.py::test_states_follow_none_and_not_every_node_has_one",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/device_states.py",
        (
            "if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):",
            "if not self._held:",
            _DEVICE_STATES + "test_a_request_that_comes_back_has_another_state",
        ),
        (
            "torch.index_select(self._rows, 0, rows[:count], out=self._table[:count, 0])",
            "self._table[:count, 0] = self._slots[:count]",
            _DEVICE_STATES + _WHERE_LAYERS_LOOK,
        ),
        ("if self._since == 1:", "if False:", _DEVICE_STATES + _WITHOUT_STATES),
        (
            "names is self.names and decodes and self._decoded",
            "decodes and self._decoded",
            _DEVICE_STATES + _WITHOUT_STATES,
        ),
        ("self._held, same = there, False", "self._held = there", _DEVICE_STATES + _WITHOUT_STATES),
        (
            "            self.left_out += 1\n",
            "",
            _DEVICE_STATES + _WITHOUT_STATES,
        ),
        (
            "self._adoptions, same = adoptions, False",
            "self._adoptions = adoptions",
            _DEVICE_STATES + "test_states_are_shown_again_when_records_were_declared_unknown",
        ),
        (
            "(counted - self._counted_from) * (self.every - 1) // self.every",
            "counted",
            _DEVICE_STATES + "test_no_more_forwards_are_left_out_than_may_be",
        ),
        (
            "tracked.copied and self._states.shown",
            "tracked.copied",
            _DEVICE_STATES
            + "test_what_is_left_by_a_forward_that_is_shown_without_states_is_a_forward_of_its_own",
        ),
        (
            "        self._since, self._decoded = 0, False\n",
            "",
            _DEVICE_STATES + "test_after_an_idle_forward_the_states_are_shown_again",
        ),
        (
            "% self._interval == 0",
            "% self._interval == 1",
            _DEVICE_STATES + "test_a_decode_copies_the_states_of_requests_at_the_interval",
        ),
        (
            ">= self._chunk",
            "> self._chunk",
            _DEVICE_STATES + _OF_ITS_OWN,
        ),
        ("            self.shown += 1\n", "", _DEVICE_STATES + _OF_ITS_OWN),
        (
            "            observer.before_load(STATE, tracked.slots)\n",
            "",
            _DEVICE_STATES + "test_a_decode_copies_the_states_of_requests_at_the_interval",
        ),
        (
            "            observer.invalidated(STATE, tracked.slots)\n",
            "",
            _DEVICE_STATES + "test_what_a_forward_that_failed_has_left_has_no_record",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/window_count.py",
        (
            "self._mapping[:-1], self._mapping.device",
            "self._mapping[:-2], self._mapping.device",
            _TESTS + "test_window_count.py::test_tokens_by_the_allocators",
        ),
        (
            "            self._coming = coming\n",
            "",
            _TESTS + "test_window_count.py::test_a_count_that_has_not_come_is_not_waited_for",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/node_walk.py",
        (
            "parent < 0 or self._tokens[node] > self._lengths[node]",
            "parent < 0",
            _TESTS + "test_component_tree.py::test_slots_of_windows_follow_none_that_has_left_its_window",
        ),
        (
            "-1 if alone else self._last[parent]",
            "-1",
            _TESTS + "test_radix_tree.py::test_every_slot_follows_the_last_of_its_parent",
        ),
        (
            "                self._last[node] = int(slots[start - 1])\n",
            "",
            _TESTS + "test_radix_tree.py::test_every_slot_follows_the_last_of_its_parent",
        ),
        (
            "self._depths[node] + offset - start",
            "self._depths[node] - start",
            _WALK + "test_pieces_are_what_there_is_at_once",
        ),
        (
            "            if arrived is not None and not arrived.query():\n                return False\n",
            "",
            _WALK + "test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted",
        ),
        (
            "0 if self._freed.noted() else self._waits + 1",
            "0",
            _WALK + "test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted",
        ),
        (
            " or self._waits > _MOST_WAITS",
            "",
            _WALK + "test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/node_tree.py",
        (
            "        self._marks[group] = self._freed[group].mark()\n",
            "",
            _WALK + "test_what_the_tree_does_to_nodes_after_its_listing_does_not_matter",
        ),
    ),
    *mutants(
        "canary_obs/runtime/sweep/sweeper.py",
        (
            " and current.work[current.next_group][1].ready",
            "",
            _TIME + "test_a_sweep_waits_for_its_walk_in_later_steps",
        ),
        (
            "budget_seconds - current.began_seconds",
            "budget_seconds",
            _TIME + "test_the_start_of_a_sweep_is_taken_from_its_steps_budget",
        ),
        ("now + (now - before) + device", "now + device", _ROOM),
        (" + device_seconds > deadline", " > deadline", _ROOM),
    ),
)
