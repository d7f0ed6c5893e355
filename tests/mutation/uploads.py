"""Seeded defects of copies to a device, and from it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_SPACE = "tests/runtime/device/test_pinned_space.py::"
_ANY_ORDER = _SPACE + "test_no_piece_is_handed_out_twice"
_ROOM = _SPACE + "test_there_is_room_for_as_much_as_it_has"
_UPLOADS = "tests/runtime/device/test_uploads.py::"
_IN_USE = _UPLOADS + "test_memory_is_not_written_to_before_its_copy_is_done"
_FREED = "tests/engines/sglang/test_freed_slots.py::"

SPACE = mutants(
    "canary_obs/runtime/device/pinned_space.py",
    ("start < last and first < stop for first", "stop < first for first", _ANY_ORDER),
    ("        self._next = stop\n", "", _SPACE + "test_a_piece_has_the_shape_and_dtype_that_are_asked_for"),
    ("stop > size or ", "", _ROOM),
    ("            start = 0\n", "            return None\n", _ROOM),
    ("self._in_use.popleft()", "self._taken.pop()", _ANY_ORDER),
)

UPLOADS = mutants(
    "canary_obs/runtime/device/uploads.py",
    ("while self._under_way and self._under_way[0].query():", "while self._under_way:", _IN_USE),
    ("            self._space.give_back()\n", "", _IN_USE),
    ("        event.record()\n", "", _IN_USE),
    (
        "_threads = threading.local()",
        "_threads = threading.Thread()",
        _UPLOADS + "test_each_thread_has_memory_of_its_own",
    ),
)

FREED = mutants(
    "canary_obs/engines/sglang/freed_slots.py",
    (
        "            if kept and self._space is not None:\n",
        "            if self._space is not None:\n",
        _FREED + "test_slots_that_come_from_a_device_are_noted_when_they_are_there",
    ),
    (
        "                self._space.give_back()\n",
        "                pass\n",
        _FREED + "test_slots_that_come_from_a_device_are_noted_when_they_are_there",
    ),
)

ALL = SPACE + UPLOADS + FREED
