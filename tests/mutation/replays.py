"""Seeded defects of launches that are replayed."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/runtime/test_replays.py::"
_SAME = _TESTS + "test_records_and_findings_are_those_of_launches_one_by_one"
_KEPT = _TESTS + "test_as_many_batches_are_kept_as_said"

ALL = (
    *mutants(
        "canary_obs/runtime/device/replays.py",
        ("self._kept.popitem(last=False)", "self._kept.popitem()", _KEPT),
        ("        self._kept.move_to_end(key)\n", "", _KEPT),
    ),
    *mutants(
        "canary_obs/runtime/device/batches.py",
        (
            "return None if found is None else self._show(*found)",
            "return None",
            _TESTS + "test_batches_that_take_turns_are_captured_once_each",
        ),
    ),
    *mutants(
        "canary_obs/runtime/forward.py",
        ("            self.head(self._owing)\n", "            pass\n", _SAME),
        ("        verify_rows(group.backend, group.buffers, batch, layout.Phase.HEAD)\n", "", _SAME),
        (
            "                health.count_launch(group.index, layout.Phase.HEAD)\n",
            "",
            _TESTS + "test_a_forward_that_fails_leaves_no_launch_behind",
        ),
    ),
    *mutants(
        "canary_obs/runtime/slot_hooks.py",
        (
            "            faults.guard(ObserverPart.HEAD, self._announcements.before)\n",
            "            pass\n",
            _SAME,
        ),
    ),
    *mutants(
        "canary_obs/runtime/canary.py",
        (
            "        self._checks.replays = None  # in",
            "        # in",
            _TESTS + "test_where_the_head_precedes_the_forward_nothing_waits_for_the_tail",
        ),
    ),
)
