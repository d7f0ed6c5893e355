"""Defects of the record mathematics, verify, write and fingerprint."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_KERNELS = "kernels/canary_kernels/"
_HASH = "tests/kernels/test_hashing.py::"
_PRINT = "tests/kernels/test_fingerprint.py::"
_SHARED = "tests/kernels/test_shared_slots.py::"
_LIMITS = "tests/kernels/test_limits.py::"
_LOOK_BACK = "tests/kernels/test_look_back.py::"
_RECORDS = "tests/kernels/test_records.py::"
_ROWS = _RECORDS + "test_verify_rows[Backend.TORCH]"
_CHAIN = _RECORDS + "test_a_broken_chain_accuses_the_record_and_the_one_after_it[1-accused1-Backend.TORCH]"
_ROWS_COMPILED = _RECORDS + "test_verify_rows[Backend.NUMBA]"
_WRITES = _RECORDS + "test_write_identities[Backend.TORCH]"
_STATES = _PRINT + "test_every_state_in_every_phase"

HASHING = mutants(
    _KERNELS + "hashing.py",
    (
        "_SHIFTS = np.uint64(30), np.uint64(27)",
        "_SHIFTS = np.uint64(29), np.uint64(27)",
        _HASH + "test_mix64_equals_plain_integers",
    ),
    (
        "(value ^ value >> 27) * FINALIZE_SECOND",
        "(value ^ value >> 26) * FINALIZE_SECOND",
        _HASH + "test_design_vectors",
    ),
    ("    terms += _MIX_OFFSET\n", "    terms -= _MIX_OFFSET\n", _HASH + "test_mix64_equals_plain_integers"),
    (
        "mix_arrays(tokens.numpy(), np.arange(tokens.shape[0]))",
        "mix_arrays(tokens.numpy(), np.zeros(tokens.shape[0]))",
        _HASH + "test_chain_vector",
    ),
    (
        "_finalize(words * _TOKEN_FACTOR) | np.uint64(1)",
        "_finalize(words * _TOKEN_FACTOR)",
        _HASH + "test_keys_equal_plain_integers",
    ),
    (
        "_finalize(layers * _POSITION_FACTOR + _MIX_OFFSET)",
        "_finalize(layers * _POSITION_FACTOR)",
        _HASH + "test_keys_equal_plain_integers",
    ),
)

VERIFY = mutants(
    _KERNELS + "verify/reference.py",
    ("unwritten &= ~pending", "unwritten &= pending", _ROWS),
    ("misplaced = complete & (stored != positions)", "misplaced = complete & (stored < positions)", _ROWS),
    ("& (positions > 0)\n", "& (positions > 1)\n", _CHAIN),
    ("complete & ~misplaced & (linked", "complete & (linked", _ROWS),
    (
        "np.minimum(ends, table.shape[1] * batch.page_size) - starts",
        "ends - starts",
        _LIMITS + "test_lengths_beyond_the_table_are_cut[Backend.TORCH]",
    ),
    ("following[:-1] = records.chain[1:]", "following[:-1] = continued[:-1]", _CHAIN),
)

VERIFY_COMPILED = mutants(
    _KERNELS + "verify/cpu.py",
    (
        "clean = position > 0 or load_int64(record, _CHAIN) == ANCHOR",
        "clean = True",
        _RECORDS + "test_a_broken_chain_accuses_the_record_and_the_one_after_it[0-accused0-Backend.NUMBA]",
    ),
)

WRITE = mutants(
    _KERNELS + "write/reference.py",
    ("new_records[~replaced, CHAIN + 1 :] = 0", "new_records[:, CHAIN + 1 :] = 0", _WRITES),
    ("given != new.positions", "given < new.positions", _WRITES),
    ("(wanted >= 0) & (wanted != new.ids)", "wanted != new.ids", _WRITES),
    (
        "sums = mixed.cumsum() - mixed",
        "sums = mixed.cumsum()",
        _LIMITS + "test_long_prefills_chain_across_chunks_and_forwards[True-Backend.TORCH]",
    ),
    (
        "    records[places] = 0\n",
        "",
        "tests/kernels/test_records.py::test_reset_leaves_the_state_and_spares_other_slots",
    ),
)

WRITE_COMPILED = mutants(
    _KERNELS + "write/cpu.py",
    (
        "if wanted >= 0 and wanted != found:",
        "if wanted > 0 and wanted != found:",
        _RECORDS + "test_one_wrong_input_is_seen[expected_ids-Backend.NUMBA]",
    ),
)

WRITE_TRITON = mutants(
    _KERNELS + "write/kernel.py",
    (
        "stale = wanted & (((found >> 32) & LOW_WORD) != stamp)",
        "stale = wanted & (found == 0)",
        _LOOK_BACK + "test_sums_of_an_earlier_launch_are_not_believed[1]",
    ),
    (
        "summed = chunk * BLOCK",
        "summed = first",
        _LOOK_BACK + "test_sums_of_an_earlier_launch_are_not_believed[1]",
    ),
    (
        "(total >> 32) & LOW_WORD) | (stamp << 32)",
        "total & LOW_WORD) | (stamp << 32)",
        _LOOK_BACK + "test_every_chunk_tells_its_sum_under_the_launch_number",
    ),
    (
        "share = tl.where(split == 0, idle + 1, 1)",
        "share = tl.where(split == 0, idle, 1)",
        _LOOK_BACK + "test_every_chunk_tells_its_sum_under_the_launch_number",
    ),
    (
        "if ((low | high) >> 48) == 0:",
        "if ((low | high) >> 48) < 0:",
        _LOOK_BACK + "test_what_was_told_is_not_summed_anew",
    ),
    (
        "done = tl.minimum(done + AT_ONCE, chunk)",
        "done = chunk",
        _LOOK_BACK + "test_more_chunks_than_are_looked_at_at_once",
    ),
)

FINGERPRINT = mutants(
    _KERNELS + "fingerprint/reference.py",
    (
        "pending = _states(found) == RecordState.PENDING",
        "pending = _states(found) > RecordState.EMPTY",
        _STATES,
    ),
    (
        "complete = (states == RecordState.COMPLETE) | (states == RecordState.BASELINE)",
        "complete = states > RecordState.PENDING",
        _STATES,
    ),
)

FINGERPRINT_TRITON = mutants(
    _KERNELS + "fingerprint/kernel.py",
    (
        "if LISTED else slots + index",
        "if LISTED else slots * 0 + index",
        _PRINT + "test_a_range_is_compared_as_the_list_of_it[3-separate-Backend.TRITON]",
    ),
)

SHARED_SLOTS = (
    mutants(
        _KERNELS + "fingerprint/kernel.py",
        (
            "if ends and wanted:",
            "if leads and wanted:",
            _SHARED + "test_the_same_as_with_one_program[Backend.TRITON-deep]",
        ),
        (
            "has_long_rows(plan))\n",
            "False)\n",
            _SHARED + "test_the_same_as_with_one_program[Backend.TRITON-long]",
        ),
    )
    + mutants(
        _KERNELS + "fingerprint/words.py",
        (
            "tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK",
            "tl.program_id(1) * BLOCK, BLOCK",
            _SHARED + "test_the_same_as_with_one_program[Backend.TRITON-long]",
        ),
    )
    + mutants(
        _KERNELS + "fingerprint/outcome.py",
        (
            "last = (come & _ALL) == programs",
            "last = (come & _ALL) == 1",
            _SHARED + "test_a_flipped_bit_of_each_layer_is_found[Backend.TRITON-deep]",
        ),
        (
            "one = tl.where(wanted, hash_k * 0 + _ONE_WANTED, hash_k * 0 + 1)",
            "one = hash_k * 0 + _ONE_WANTED",
            _SHARED + "test_a_record_that_changes_meanwhile_is_left_out_and_the_sums_are_zero_again",
        ),
        (
            'hash_v = tl.atomic_xchg(share + 1, hash_v * 0, sem="relaxed")',
            'hash_v = tl.atomic_add(share + 1, hash_v * 0, sem="relaxed")',
            _SHARED + "test_the_same_as_with_one_program[Backend.TRITON-deep]",
        ),
    )
)

PLAN = mutants(
    _KERNELS + "fingerprint/plan.py",
    (
        "source.plane * PLANE_WORDS + source.head_start * source.head_bytes // _WORD_BYTES",
        "source.plane * PLANE_WORDS",
        _PRINT + "test_shards_add_up_over_heads_and_layers[1-Backend.TORCH]",
    ),
    (
        "// source.page_stride + 1)",
        "// source.page_stride)",
        _PRINT + "test_records_without_memory_behind_them_are_refused",
    ),
)

LOCATE = mutants(
    _KERNELS + "fingerprint/locate.py",
    (
        "(deltas > -_WORD_RANGE)",
        "(deltas > 0)",
        _PRINT + "test_every_single_bit_flip_is_seen_and_located[separate]",
    ),
    (
        "    for _ in range(5):\n",
        "    for _ in range(3):\n",
        _PRINT + "test_locate_gives_back_any_overwritten_word",
    ),
)

LOG = mutants(
    _KERNELS + "violations.py",
    (
        "free = (log[places, ROW_STEP] != step) | (log[places, ROW_EVENT] == 0)",
        "free = places >= 0",
        _LIMITS + "test_a_log_row_is_written_once_per_step[Backend.TORCH]",
    ),
    (
        "np.where(events == 0, 0, 1 + (events - 1) % latest)",
        "events % (latest + 1)",
        _LIMITS + "test_flood_keeps_the_first_row_whole_rows_and_every_count[Backend.TORCH]",
    ),
)

DIGEST = mutants(
    _KERNELS + "digest/reference.py",
    (
        "if not 0 < first <= stop:",
        "if not 0 < first:",
        "tests/kernels/test_digest.py::test_lists_are_followed",
    ),
    (
        "accepted = max(first - int(counts[row]), 0)",
        "accepted = tails.shape[1]",
        "tests/kernels/test_digest.py::test_rejected_drafts_leave_the_chain",
    ),
)

_AHEAD = "tests/kernels/test_drafts.py::test_slots_that_drafting_may_write"
DRAFTS = mutants(
    _KERNELS + "drafts/reference.py",
    (", reserve.limit - 1)", ", reserve.limit)", _AHEAD),
    ("(pages < table.shape[1])", "(pages <= table.shape[1])", _AHEAD),
)

_ARRIVAL = "tests/kernels/test_arrival.py::"
_LOADED = "tests/runtime/test_loads.py::"
ARRIVAL = mutants(
    _KERNELS + "arrival/reference.py",
    (
        "(~known & (unchanged == Unchanged.REPLACED))",
        "(~known & (unchanged != Unchanged.CHANGED))",
        _ARRIVAL + "test_without_records_only_what_cannot_be_right_is_lost[Backend.TORCH]",
    ),
    (
        "wrong = known & ~matched & ~each[:, part - 1]",
        "wrong = known & ~each[:, part - 1] & (part == Part.K)",
        _ARRIVAL + "test_each_part_is_lost_by_itself[Backend.TORCH]",
    ),
    (
        "equal.all(2).any(1), equal.any(1)",
        "equal[:, :1].all(2).any(1), equal.any(1)",
        _ARRIVAL + "test_unchanged_bytes_are_right_where_they_are_what_was_sent[Backend.TORCH]",
    ),
    (
        "folds[:, 0] = (complete | ~filled).all(1) & filled.any(1)",
        "folds[:, 0] = filled.any(1)",
        _LOADED + "test_folds_are_of_records_not_of_bytes",
    ),
    (
        "same = (known & (now == old[:, :, layout.FINGERPRINT_K :])) | zero",
        "same = known & (now == old[:, :, layout.FINGERPRINT_K :])",
        _LOADED + "test_a_lost_load_into_a_pool_that_was_never_written_is_found",
    ),
    (
        "(baseline & (old[:, :, layout.CHAIN] != 0))",
        "baseline",
        _LOADED + "test_what_lay_there_is_not_known_and_so_not_accused",
    ),
    (
        "np.stack((named & (token | position), named & token), -1)",
        "np.stack((named, named), -1)",
        _LOADED + "test_the_same_tokens_may_leave_the_same_bytes",
    ),
    (
        "np.where(matched.numpy()[:, None] != 0, identity,",
        "np.where(matched.numpy()[:, None] == 0, identity,",
        _LOADED + "test_bytes_that_equal_what_was_sent_are_as_good_as_written",
    ),
)
ARRIVAL_TRITON = mutants(
    _KERNELS + "arrival/kernel.py",
    (
        "((known == 0) & (unchanged == REPLACED))",
        "((known == 0) & (unchanged != CHANGED))",
        _ARRIVAL + "test_without_records_only_what_cannot_be_right_is_lost[Backend.TRITON]",
    ),
    ("(complete == filled)", "(complete > 0)", _ARRIVAL + "test_records_are_folded_alike[0-False]"),
    (
        "named = complete | (baseline & (chain != 0))",
        "named = complete | baseline",
        _ARRIVAL + "test_blocks_are_weighed_alike[0]",
    ),
    (
        "inside & tl.where(copies > 0, offset < filled, within)",
        "within",
        _ARRIVAL + "test_blocks_are_weighed_alike[0]",
    ),
    (
        "identity ^ COMPLETE_TO_BASELINE)",
        "identity)",
        _ARRIVAL + "test_records_are_kept_alike[2]",
    ),
)

KEPT_LAUNCHES = mutants(
    "kernels/canary_kernels/checks.py",
    (
        "if kept is None or not all(map(operator.is_, kept[0], given)):",
        "if kept is None:",
        "tests/kernels/test_launched_again.py::test_equal_objects_are_others",
    ),
)

ALL = (
    *ARRIVAL, *ARRIVAL_TRITON, *HASHING, *VERIFY, *VERIFY_COMPILED, *WRITE, *WRITE_COMPILED, *WRITE_TRITON,
    *FINGERPRINT, *FINGERPRINT_TRITON, *SHARED_SLOTS, *PLAN, *LOCATE, *LOG, *DIGEST, *DRAFTS, *KEPT_LAUNCHES,
)  # fmt: skip
