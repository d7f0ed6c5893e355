"""Defects that survived when they were tried first; others are in accounts, adopted and bytes_owed."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_READER = "tests/runtime/device/test_counter_reader.py::"
_SAME_FORWARD = "tests/kernels/test_records.py::test_a_prefix_that_the_same_forward_writes[order0-False-"
_RECORDS = "tests/kernels/test_record_check.py::"
_COPIES = "tests/runtime/test_owed_slots.py::TestOfCopies"
_WITNESS = "tests/kernels/test_records.py::test_only_a_complete_record_is_a_witness[Backend."

ALL = (
    *mutants(
        "canary_obs/runtime/forward_account.py",
        (
            "awaited = int(self.in_step())",
            "awaited = 0",
            "tests/runtime/test_forward_account.py::test_a_step_that_lasts_is_not_blind",
        ),
    ),
    *mutants(
        "canary_obs/runtime/device/counter_reader.py",
        (
            "        if lanes != self._lanes:\n",
            "        self.alarmed = lanes != self._lanes\n        if self.alarmed:\n",
            _READER + "test_a_copy_without_news_does_not_end_an_alarm",
        ),
        (
            "self._counters.newest() or self._fetched",
            "self._counters.newest()",
            _READER + "test_a_copy_that_was_fetched_is_kept_until_it_is_processed",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/write/cpu.py",
        (
            "& _TOKEN != 0 and state_of(old) == _COMPLETE",
            "& _TOKEN != 0",
            _WITNESS + "NUMBA]",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/write/kernel.py",
        ("known & differs & (state_of(old) == COMPLETE)", "known & differs", _WITNESS + "TRITON]"),
    ),
    *mutants(
        "kernels/canary_kernels/write/reference.py",
        (
            "replaced &= ((old >> 32) & STATE_MASK) == RecordState.COMPLETE",
            "replaced &= ((old >> 32) & STATE_MASK) > RecordState.PENDING",
            _WITNESS + "TORCH]",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/verify/reference.py",
        (
            " or records.flaws.any():",
            ":",
            _RECORDS + "test_a_damaged_record_is_reported_once_and_links_nothing",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/verify/cpu.py",
        (
            "if state in (_PENDING, _AWAITED) and phase == _HEAD:",
            "if state in (_PENDING, _AWAITED):",
            _RECORDS + "test_what_each_state_means_in_each_phase",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/digest/kernel.py",
        (
            "(extend <= num_tokens - first_token)",
            "(extend <= num_tokens)",
            "tests/kernels/test_bounds.py::test_digests_of_inputs_that_cannot_be",
        ),
    ),
    *mutants(
        "canary_obs/runtime/announcements.py",
        (
            "            self.state.tick()\n",
            "",
            "tests/runtime/test_announcements.py::test_two_damaged_arrivals_in_one_step_both_leave_a_row",
        ),
    ),
    *mutants(
        "canary_obs/runtime/sweep/shares.py",
        (
            "layout.Unverified.ADOPTED, layout.Unverified.BASELINE,",
            "layout.Unverified.ADOPTED,",
            "tests/runtime/sweep/test_sweep_accounts.py::test_slots_with_a_baseline_are_accounted_for",
        ),
    ),
    *mutants(
        "canary_obs/runtime/device/owed_slots.py",
        ("self._expected.pop(sequence, None)", "self._expected.pop(min(self._expected), None)", _COPIES),
        ("counts[group][number] -= given - done\n", "pass\n", _COPIES),
    ),
    *mutants(
        "kernels/canary_kernels/write/kernel.py",
        (
            "adopted = inside & _is_written(",
            "adopted = ~inside & _is_written(",
            _SAME_FORWARD + "Backend.TRITON]",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/write/cpu.py",
        ("witness = linked and (old", "witness = (old", _SAME_FORWARD + "Backend.NUMBA]"),
        (
            "if column(batch, OUT_SLOTS, token) == origin:",
            "if token > 1 << 40:",
            _SAME_FORWARD + "Backend.NUMBA]",
        ),
    ),
    *mutants(
        "kernels/canary_kernels/write/reference.py",
        ("~(inside & np.isin(", "~(~inside & np.isin(", _SAME_FORWARD + "Backend.TORCH]"),
    ),
)
