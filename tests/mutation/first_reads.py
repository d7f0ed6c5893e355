"""Seeded defects of the comparison of prefix hits and copies, and of their accounts."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_READS = "tests/runtime/test_first_reads.py::"
_SEEN = _READS + "test_damage_of_a_hit_is_seen_in_the_step_that_reads_it[swa]"
_COPIES = _READS + "test_copies_are_compared_when_the_next_forward_begins[True-True]"
_CLEAN = _READS + "test_clean_traffic_compares_every_hit_and_accuses_nobody"
_RECORD = _READS + "test_a_damaged_record_of_a_hit"
_VLLM = "tests/engines/vllm/test_prefix_hits.py::"
_PAST = "tests/runtime/test_forward_account.py::test_hits_after_a_forward_that_was_not_shown_accuse_nobody"

COMPARED = mutants(
    "canary_obs/runtime/forward.py",
    (
        "        self._account.before_comparison(group.name)\n",
        "",
        "tests/runtime/test_forward_account.py::"
        "test_what_a_load_writes_over_after_forwards_that_were_not_shown_accuses_nobody",
    ),
) + mutants(
    "canary_obs/runtime/first_reads.py",
    ("slots[start : start + _CHUNK]", "slots[:_CHUNK]", _READS + "test_long_hits_are_compared_in_chunks"),
    (
        "state.owed.compared(group.index, layout.Phase.HIT, slots.shape[0])",
        "pass",
        _READS + "test_hits_whose_bytes_are_not_compared",
    ),
    ("        self._account.before_comparison(group.name)\n", "", _PAST),
    ("step += not self._account.under_way", "step += 0", _SEEN),
    (
        "step += not self._account.under_way",
        "step += 1",
        _READS + "test_damage_of_a_hit_that_is_shown_once_the_forward_has_begun",
    ),
    (
        "self._owed[group.index] += destination.shape[0]",
        "self._owed[group.index] += 0",
        _COPIES,
    ),
    (
        "        if not destination.shape[0]:\n            return\n",
        "",
        _READS + "test_a_copy_of_no_slots_is_not_kept",
    ),
    (
        "            self._owed[index] = 0\n",
        "",
        _READS + "test_each_copy_is_owed_once",
    ),
)

FORWARDS = mutants(
    "canary_obs/runtime/forward.py",
    (
        "in self._first_reads.take_copied() if self._first_reads.waiting else ():\n",
        "in ():\n",
        _COPIES,
    ),
)

ANNOUNCED = mutants(
    "canary_obs/runtime/announcements.py",
    ("        self._first_reads.copied(group, destination)\n", "", _COPIES),
)

ACCOUNT = mutants(
    "canary_obs/runtime/hit_account.py",
    (
        "self._missing[name] += max(0, difference)",
        "self._missing[name] += 0",
        _READS + "test_hits_that_the_adapter_does_not_show",
    ),
    (
        "self._surplus[name] += max(0, -difference)",
        "self._surplus[name] += 0",
        _READS + "test_hits_that_the_engine_did_not_count",
    ),
    (
        "            self._given[name] += difference\n",
        "",
        _READS + "test_hits_that_the_adapter_does_not_show",
    ),
)

SETTLED = mutants(
    "canary_obs/runtime/step_scheduler.py",
    (
        "            self._workers.hits.settle()\n",
        "            pass\n",
        _READS + "test_hits_that_the_adapter_does_not_show",
    ),
)

REFERENCE = mutants(
    "canary_obs/engines/reference/prefix_hits.py",
    ("if 0 < prefix == request.shared", "if 0 < prefix < request.shared", _SEEN),
    (
        "        for name, group in groups.items():\n",
        "        for name, group in list(groups.items())[:1]:\n",
        _CLEAN,
    ),
)

WINDOW = mutants(
    "canary_obs/engines/reference/swa_group.py",
    (
        "self._slots.of[request.slots[request.window_start : request.shared]]",
        "self._slots.of[request.slots[request.window_start : request.shared - 1]]",
        _CLEAN,
    ),
)

_SGLANG = "tests/engines/sglang/test_prefix_hits.py::"
_CHUNKS = _SGLANG + "test_later_chunks_and_requests_that_decode_are_no_hits"
_DECODE = _SGLANG + "test_a_decode_servers_own_hits_are_shown_with_the_next_forward"
SGLANG = mutants(
    "canary_obs/engines/sglang/prefix_hits.py",
    ("int(each.extend_batch_idx) == 1", "True", _CHUNKS),
    (" and id(each) not in decoding", "", _CHUNKS),
    ("int(batch.prefill_stats.log_hit_tokens)", "0", _CHUNKS),
    (
        "max(tokens - group.view.window + 1, 0)",
        "max(tokens - group.view.window, 0)",
        _SGLANG + "test_of_each_kind_of_group",
    ),
    ("read // group.ratio", "read", _SGLANG + "test_of_each_kind_of_group"),
    (
        "group.by_row is None and group.view.sources",
        "group.by_row is None",
        _SGLANG + "test_of_each_kind_of_group",
    ),
    (
        "            self._count_missed(batch.reqs)\n",
        "            pass\n",
        _SGLANG + "test_a_decode_servers_request_that_nobody_saw_come_is_counted_once",
    ),
    ("        self._joined += joined\n", "        self._joined = joined\n", _DECODE),
    ("ordered.masked_fill_(again, -1)", "ordered", _SGLANG + "test_each_slot_once"),
)

_ADMITTED = "tests/engines/vllm/test_admissions.py::"
ADMISSIONS = mutants(
    "canary_obs/engines/vllm/admissions.py",
    (
        "num_local_computed_tokens if any(new_computed_blocks) else 0",
        "num_local_computed_tokens",
        _ADMITTED + "test_hits_and_loads_are_noted_until_they_are_taken",
    ),
    (
        "                vars(coordinator)[ADMITTED] = None\n",
        "                pass\n",
        _ADMITTED + "test_what_cannot_be_noted_is_said_and_vllm_goes_on",
    ),
    (
        "            vars(coordinator)[ADMITTED] = None\n\n\ndef",
        "            noted.clear()\n\n\ndef",
        _ADMITTED + "test_a_coordinator_whose_scheduler_never_asks_says_that_it_stopped",
    ),
    (
        "    if admitted is None:\n        raise LookupError",
        "    if admitted is None:\n        return []\n        raise LookupError",
        _ADMITTED + "test_what_cannot_be_noted_is_said_and_vllm_goes_on",
    ),
)

VLLM = mutants(
    "canary_obs/engines/vllm/prefix_hits.py",
    (
        "found.update(ids[: -(-count // ",
        "found.update(ids[: (count // ",
        _VLLM + "test_a_hit_that_ends_inside_a_block_of_another_group",
    ),
    (
        "            count = min(tokens.pop(request, 0), computed)",
        "            count = computed",
        _VLLM + "test_loaded_blocks_are_no_hit",
    ),
    (
        "setattr(manager, UNCHANGED, HitBlocks(after, after))",
        "setattr(manager, UNCHANGED, HitBlocks(before, before))",
        _VLLM + "test_whole_blocks_of_every_group_without_null_blocks",
    ),
    (
        "            tokens.pop(request, None)\n",
        "            pass\n",
        _VLLM + "test_a_request_that_ends_while_it_waits_is_forgotten",
    ),
    (
        "            self._first = hits.before\n",
        "            self._first = hits.after\n",
        _VLLM + "test_hits_before_the_first_output_were_not_asked_for",
    ),
    (
        "            self.counted = self._last = None\n",
        "            self.counted = None\n",
        _VLLM + "test_a_scheduler_that_does_not_report",
    ),
    (
        "        if hits.after == self._last:\n",
        "        if self._last is not None:\n",
        _VLLM + "test_an_output_that_came_past_the_worker_is_missing",
    ),
    ("loaded_from.get(request, computed)", "computed", _VLLM + "test_loaded_blocks_are_no_hit"),
    (
        "np.setdiff1d(found, left_out, assume_unique=True)",
        "np.setdiff1d(found, [0])",
        _VLLM + "test_a_partial_block_is_a_copy",
    ),
    (
        "    if resumed := cached.resumed_req_ids:\n",
        "    if resumed := set():\n",
        _VLLM + "test_a_resumed_request_joins_again",
    ),
)

KERNELS = mutants(
    "kernels/canary_kernels/fingerprint/cpu.py",
    (
        "if damaged and phase in (_HEAD, _PATROL, _HIT):",
        "if damaged and phase in (_HEAD, _PATROL):",
        _RECORD + "[numba]",
    ),
) + mutants(
    "kernels/canary_kernels/fingerprint/reference.py",
    (
        "if phase in (Phase.HEAD, Phase.PATROL, Phase.HIT):",
        "if phase in (Phase.HEAD, Phase.PATROL):",
        _RECORD + "[torch]",
    ),
)

ALL = (
    *COMPARED, *FORWARDS, *ANNOUNCED, *ACCOUNT, *SETTLED, *REFERENCE, *WINDOW, *SGLANG, *ADMISSIONS, *VLLM,
    *KERNELS,
)  # fmt: skip
