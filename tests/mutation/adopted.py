"""Defects of records that check themselves, and of slots without a history."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_KERNELS = "kernels/canary_kernels/"
_CHECK = "tests/kernels/test_record_check.py::"
_ALL_BITS = _CHECK + "test_every_bit_of_a_record_is_checked_or_harmless"
_ONCE = _CHECK + "test_a_damaged_record_is_reported_once_and_links_nothing"
_STATES = "tests/kernels/test_fingerprint.py::test_every_state_in_every_phase"
_ANNOUNCED = "tests/runtime/test_announcements.py::"

CHECK = (
    *mutants(
        _KERNELS + "layout.py",
        ("FOLD_SHIFTS = (40, 20, 10, 5)", "FOLD_SHIFTS = (40, 20, 10)", _CHECK + "test_known_values"),
    ),
    *mutants(
        _KERNELS + "verify/reference.py",
        ("damaged = records.flaws != 0", "damaged = records.flaws < 0", _ALL_BITS),
    ),
    *mutants(
        _KERNELS + "verify/cpu.py",
        ("held == wanted and flaw_at(record) == 0", "held == wanted", _ONCE + "[2-3-Backend.NUMBA]"),
        (
            "state_of(load_int64(record, _IDENTITY)) == _COMPLETE and flaw_at(record) == 0",
            "state_of(load_int64(record, _IDENTITY)) == _COMPLETE",
            _ONCE + "[1-3-Backend.NUMBA]",
        ),
    ),
    *mutants(
        _KERNELS + "verify/kernel.py",
        ("intact = flaw_of(identity, chain) == 0", "intact = chain == chain", _ONCE),
        ("damaged = known & (flaw != 0)", "damaged = known & (flaw < 0)", _ONCE),
    ),
    *mutants(
        _KERNELS + "fingerprint/outcome.py",
        ("        damaged = flaw != 0\n", "        damaged = flaw < 0\n", _ALL_BITS),
        (
            "tl.store(record, identity ^ ADOPTED_TO_BASELINE)",
            "tl.store(record, identity ^ PENDING_TO_COMPLETE)",
            _STATES + "[0-baseline-Backend.TRITON]",
        ),
    ),
    *mutants(
        _KERNELS + "fingerprint/reference.py",
        (
            "adopted = (states == RecordState.ADOPTED) & sound",
            "adopted = states >= RecordState.ADOPTED",
            _STATES + "[0-baseline-Backend.TORCH]",
        ),
        (
            "found[:, IDENTITY] ^= ADOPTED_TO_BASELINE",
            "found[:, IDENTITY] ^= 0",
            _STATES + "[0-baseline-Backend.TORCH]",
        ),
    ),
)

STATES = (
    *mutants(
        "canary_obs/runtime/announcements.py",
        (
            "            group.receive(slots)\n",
            "            pass\n",
            _ANNOUNCED + "test_received_bytes_without_records_get_a_baseline_on_arrival",
        ),
        (
            "group.copy(source, destination)",
            "group.copy(destination, source)",
            _ANNOUNCED + "test_an_announced_copy_carries_its_records",
        ),
        (
            "group.await_bytes(slots)",
            "group.adopt(slots)",
            _ANNOUNCED + "test_bytes_that_are_awaited_are_compared_with_nothing_until_they_arrive",
        ),
    ),
)

_BASELINES = "tests/runtime/test_baselines.py::"
_WARM = _BASELINES + "test_an_engine_attached_warm_is_not_ok_until_its_baselines_are_taken[llama]"
DEBT = (
    *mutants(
        "canary_obs/runtime/check_coverage.py",
        (
            "_unverified(layout.Unverified.ADOPTED), ",
            "_unverified(layout.Unverified.PENDING), ",
            _BASELINES + "test_traffic_over_adopted_slots_is_below_the_target",
        ),
        (
            "if baselines.missing_runs:",
            "if baselines.missing_runs < 0:",
            _BASELINES + "test_a_baseline_kernel_that_does_not_run",
        ),
        (
            "if baselines.waiting and not self._expected_wait:",
            "if baselines.waiting and baselines.due is None:",
            _WARM,
        ),
        (
            "debt > self._accepted and self._target > 0",
            "debt > self._accepted > 0",
            _BASELINES + "test_adopted_slots_whose_bytes_nothing_covers_stay_a_debt",
        ),
    ),
    *mutants(
        "canary_obs/runtime/baselines.py",
        (
            "self._covered, self._ended = -1, self._passing, self._clock()",
            "self._covered, self._ended = -1, self._state.adoptions.count, self._clock()",
            _BASELINES + "test_slots_adopted_during_a_pass_are_left_to_the_next",
        ),
    ),
    *mutants(
        "canary_obs/runtime/device/state.py",
        ("self.adoptions.count += slots.numel() > 0", "self.adoptions.count += 0", _WARM),
    ),
)

ALL = (*CHECK, *STATES, *DEBT)
