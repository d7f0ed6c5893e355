"""Seeded defects of copies to a device."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/runtime/device/test_uploads.py::"
_ANY_ORDER = _TESTS + "test_no_copy_under_way_is_ever_written_over"
_IN_USE = _TESTS + "test_memory_is_not_written_to_before_its_copy_is_done"

ALL = mutants(
    "canary_obs/runtime/device/uploads.py",
    ("start < last and first < stop for first", "stop < first for first", _ANY_ORDER),
    ("while self._under_way and self._under_way[0][2].query():", "while self._under_way:", _ANY_ORDER),
    ("        event.record()\n", "", _IN_USE),
    ("        self._next = stop\n", "", _IN_USE),
    (
        "stop > self._memory.shape[0] or ",
        "",
        _TESTS + "test_what_is_larger_than_the_memory_has_no_room",
    ),
    (
        "_threads = threading.local()",
        "_threads = threading.Thread()",
        _TESTS + "test_each_thread_has_memory_of_its_own",
    ),
)
