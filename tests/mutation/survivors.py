"""Defects that survived when they were tried first; others are in accounts, adopted and bytes_owed."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_READER = "tests/runtime/device/test_counter_reader.py::"
_WITNESS = "tests/kernels/test_records.py::test_only_a_complete_record_is_a_witness[Backend."

ALL = (
    *mutants(
        "canary_obs/runtime/forward_account.py",
        (
            "awaited = int(self._in_step())",
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
)
