"""Seeded defects of what the engine counts itself and what is compared with it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_FORWARDS = "tests/runtime/test_forward_account.py::"
_NOT_CALLED = _FORWARDS + "test_a_hook_that_is_not_called[llama]"

ACCOUNT = mutants(
    "canary_obs/runtime/forward_account.py",
    (
        "        self._settle(counted)\n        return True",
        "        self.settle()\n        return True",
        _FORWARDS + "test_a_step_that_begins_within_an_idle_call[settle_idle]",
    ),
    (
        "            self._settle(counted)\n",
        "            self.settle()\n",
        _FORWARDS + "test_a_step_that_begins_within_an_idle_call[settle_at_rest]",
    ),
    ("            self._state.by_name[name].adopt_all()\n", "            pass\n", _NOT_CALLED),
    (
        "if counts is not None and counts.get(name, 0) != begun[name]:",
        "if False:",
        _FORWARDS + "test_slots_are_adopted_before_the_next_forward_is_checked",
    ),
    (
        "if missing := counts.get(name, 0) - ended:",
        "if (missing := counts.get(name, 0) - ended) < 0:",
        _NOT_CALLED,
    ),
    (
        "missing[name] += max(0, count - self._begun[name] - awaited)",
        "pass",
        _FORWARDS + "test_hooks_that_do_not_reach_the_canary_at_all",
    ),
    (
        "counted != self._ended and counted != self._unsettled",
        "False",
        _FORWARDS + "test_a_step_that_begins_while_an_idle_call_looks",
    ),
)

COMPARED = mutants(
    "canary_obs/runtime/canary.py",
    (
        "        self._scheduler.settle_at_rest()\n        self._adapter.detach()\n",
        "        self._adapter.detach()\n",
        _FORWARDS + "test_a_short_step_that_was_not_shown_is_seen_at_the_end[detach]",
    ),
    (
        "        self._scheduler.settle_at_rest()\n        self.baselines",
        "        self.baselines",
        _FORWARDS + "test_a_short_step_that_was_not_shown_is_seen_at_the_end[check_everything]",
    ),
    (
        "        self.forwards.start()\n",
        "",
        "tests/runtime/test_forward_account.py::test_forwards_before_the_start_are_not_missed",
    ),
)

CHECKED = mutants(
    "canary_obs/runtime/forward.py",
    (
        "        self._batches = ()\n        self._account.end()\n",
        "        self._batches = ()\n",
        _FORWARDS + "test_a_clean_engine_is_in_balance",
    ),
)

COUNTED = mutants(
    "canary_obs/engines/reference/adapter.py",
    (
        "counts[DRAFT] = statistics.draft_forwards",
        "counts.pop(DRAFT)",
        _FORWARDS + "test_a_draft_pass_that_is_not_shown",
    ),
)

_COUNT = "tests/engines/vllm/test_forward_count.py::"
OUTPUTS = mutants(
    "canary_obs/engines/vllm/forward_count.py",
    (
        "self._count = max(self._count, number - self._first)",
        "pass",
        _COUNT + "test_an_output_that_came_past_the_worker_is_counted_by_the_next",
    ),
    (
        "if scheduler_output.total_num_scheduled_tokens:",
        "if True:",
        _COUNT + "test_only_outputs_with_tokens_count",
    ),
)

_SWEEP = "tests/runtime/sweep/test_sweep_accounts.py::"
_WALKS = _SWEEP + "test_a_walk_that_leaves_slots_out"
SWEEPER = mutants(
    "canary_obs/runtime/sweep/sweeper.py",
    (
        "            current.settles_at = next_sequence\n",
        "            current.settles_at = next_sequence - 1\n",
        _SWEEP + "test_a_sweep_ends_with_the_copy_that_holds_its_last_results",
    ),
    (
        "complete = result.status in (SweepStatus.PASSED, SweepStatus.VIOLATED)",
        "complete = result.status is not SweepStatus.CANCELLED",
        _SWEEP + "test_a_sweep_that_launches_too_few_slots",
    ),
    (
        "            if shortfall:\n",
        "            if False:\n",
        _SWEEP + "test_a_sweep_that_launches_too_few_slots",
    ),
    (
        "slots, positions, previous = self._uploads.put(slots, cached.positions, previous)",
        "slots, positions, previous = self._uploads.put(slots[1:], cached.positions[1:], previous[1:])",
        "tests/runtime/sweep/test_sweeper.py::test_a_pass_accounts_for_every_slot_while_the_cache_changes",
    ),
    (
        "        for name in names:\n",
        "        for name in names[:1]:\n",
        _SWEEP + "test_a_group_that_a_sweep_leaves_out",
    ),
)

SHARES = mutants(
    "canary_obs/runtime/sweep/shares.py",
    (
        "if gone is not None and debt.evicted > gone:",
        "if False:",
        _SWEEP + "test_slots_that_are_said_to_be_evicted",
    ),
    ("if debt.span is None:", "if False:", _SWEEP + "test_a_group_that_a_sweep_leaves_out"),
    (
        "            elif missing:\n",
        "            elif missing > 0 and not found:\n",
        _SWEEP + "test_errors_of_two_groups_do_not_cancel",
    ),
)

WALK = mutants(
    "canary_obs/runtime/sweep/walk.py",
    ("count.shown == count.expected == count.different", "count.shown == count.expected", _WALKS),
    ("count.shown == count.expected == count.different", "True", _WALKS),
    (
        "            count.complete = True\n",
        "",
        _SWEEP + "test_a_part_of_a_cache_is_swept_and_all_of_it_counted",
    ),
    (
        "            self._uncounted.add(group)\n",
        "            pass\n",
        _SWEEP + "test_an_engine_that_does_not_count_its_cache",
    ),
)

_GAP = "tests/engines/vllm/test_cached_blocks.py::test_a_walk_passes_over_blocks_that_are_not_cached"
_LATER = "tests/engines/vllm/test_cached_blocks.py::test_events_may_be_applied_later"
_TAKEN = "tests/engines/vllm/test_cached_blocks.py::test_a_walk_shows_what_was_cached_when_it_began"
PARTS = (
    *mutants(
        "canary_obs/engine_api/walks.py",
        (
            "min(self._shown + limit, self.total)",
            "min(self._shown + limit, self.total - 1)",
            "tests/runtime/sweep/test_sweeper.py::test_a_pass_accounts_for_every_slot_while_the_cache_changes",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/group_blocks.py",
        (
            "self._blocks.slots(held, filled[held])",
            "self._blocks.slots(held, self._blocks.filled[held])",
            _TAKEN,
        ),
        ("int(held[-1]) + 1 if", "int(held[-1]) + 2 if", _TAKEN),
        ("        np.copyto(since, blocks.since)\n", "        since[:] = blocks.since[0]\n", _TAKEN),
        ("        while not held.size and", "        if not held.size and", _GAP),
        ("self.total -= int(self.filled[blocks].sum(where=self.since[blocks] != NEVER))", "pass", _TAKEN),
        (
            "        self._settle()\n        since, filled = self._blocks.walked",
            "        since, filled = self._blocks.walked",
            _LATER,
        ),
        ("before = since.get(previous)", "before = None", _LATER),
        ("since[event] = NEVER", "since.pop(event, None)", _LATER),
    ),
    *mutants(
        "canary_obs/engines/vllm/cached_blocks.py",
        ("            group.total += more\n", "", _TAKEN),
        ("np.array([*{*events}], dtype=np.int64)", "np.array(events, dtype=np.int64)", _LATER),
        (
            "        if type(counts) is Later:\n            self.due = True\n",
            "",
            "tests/engines/vllm/test_cached_blocks.py::"
            "test_counts_that_come_later_are_asked_for_once[once the forward was launched]",
        ),
        ("in self._states)\n            self._clock += len(events)\n", "in self._states)\n", _LATER),
    ),
)

_MAP = "tests/engines/vllm/test_cache_count.py::"
BLOCKS = mutants(
    "canary_obs/engines/vllm/cache_count.py",
    (
        "                if not keys:\n                    counts",
        "                if True:\n                    counts",
        _MAP + "test_blocks_count_once_however_many_keys_they_have",
    ),
    (
        "self._removed[group] = self._removed.get(group, 0) + cached",
        "pass",
        _MAP + "test_a_reset_removes_all_and_is_remembered_by_the_next_map",
    ),
    (
        "                self._leave_room(group, ~block, 0)\n",
        "                pass\n",
        _MAP + "test_blocks_that_are_cached_in_part",
    ),
    (
        "else [], None\n",
        "else [], self.reported\n",
        _MAP + "test_what_a_map_holds_at_first_is_counted",
    ),
    (
        "            self._later.get()\n        if self.changes",
        "            pass\n        if self.changes",
        _MAP + "test_counts_of_a_prompt_are_those_of_its_output[by the next]",
    ),
    (
        "                self._add(*given)\n",
        "                self.settle()\n",
        _MAP + "test_counts_of_a_prompt_are_those_of_its_output[after more]",
    ),
    (
        "self._places[blocks[::-1]] = places[::-1]",
        "self._places[blocks] = places",
        _MAP + "test_blocks_that_are_counted_together_are_counted_as_one_by_one[1-4096]",
    ),
    (
        "            if not blocks.size:\n                return\n",
        "            return\n",
        _MAP + "test_blocks_that_are_counted_together_are_counted_as_one_by_one[1-4096]",
    ),
    (
        "gained & (before == 0)",
        "gained & (before >= 0)",
        _MAP + "test_a_prompt_displaces_blocks_and_takes_some_of_them[ab]",
    ),
    (
        "~gained & (before <= 1)",
        "~gained & (before <= 9)",
        _MAP + "test_a_prompt_displaces_blocks_and_takes_some_of_them[ab]",
    ),
    (
        "            self.reported = None\n            self._leave_room(group, block, room)",
        "            self._leave_room(group, block, room)",
        _MAP + "test_blocks_that_are_cached_in_part",
    ),
    (
        "        self.reported = None\n        for group, cached",
        "        for group, cached",
        _MAP + "test_a_reset_removes_all_and_is_remembered_by_the_next_map",
    ),
)

_COVERAGE = "tests/runtime/device/test_coverage.py::"
COVERAGE = mutants(
    "canary_obs/runtime/device/coverage.py",
    (
        "shown if allocation is None else max(shown, allocation.bytes)",
        "shown",
        _COVERAGE + "test_a_hidden_part",
    ),
    ("            if held < expected:\n", "            if False:\n", _COVERAGE + "test_a_hidden_layer"),
    (
        "            return [(State.DEGRADED, text)]\n",
        "            return []\n",
        _COVERAGE + "test_an_engine_that_does_not_say_what_it_has",
    ),
    (
        "found = list(self._allocation.left_out)",
        "found = []",
        _COVERAGE + "test_what_an_adapter_left_out_is_degraded_whatever_its_share",
    ),
)

ALL = *COVERAGE, *ACCOUNT, *SWEEPER, *SHARES, *WALK, *PARTS, *BLOCKS, *COMPARED, *CHECKED, *COUNTED, *OUTPUTS
