"""Seeded defects of the reconciliation of bytes, of delayed copies, and of the patrol's ages."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_OWED = "tests/runtime/test_owed_slots.py::"
_CLEAN = _OWED + "test_a_clean_engine_owes_nothing[llama]"
_WINDOWS = _OWED + "test_a_clean_engine_owes_nothing[swa]"
_AROUND = _OWED + "test_a_byte_check_around_a_forward_that_does_not_run"
_COPIES = _OWED + "test_each_copy_is_compared_with_what_was_given_before_it"
_LESS = _OWED + "test_a_patrol_that_compares_less_than_its_ranges"
_AGES = "tests/runtime/patrol/test_patrol.py::test_one_chunk_does_not_refresh_the_ages_of_others"

RECONCILED = mutants(
    "canary_obs/runtime/device/owed_slots.py",
    (
        "        if counted == expected:\n",
        "        if counted:\n",
        _OWED + "test_half_of_the_slots_are_not_compared",
    ),
    (
        "*(layout.COUNT_UNHASHED + _PHASES)",
        "*(layout.COUNT_HASHED + _PHASES)",
        _CLEAN,
    ),
    ("[list(given) for given in self._given]", "self._given", _COPIES),
)

_BETWEEN = (
    "tests/runtime/test_owed_slots.py::test_forwards_of_changing_batches_between_two_copies_owe_nothing"
)
FORWARDS = mutants(
    "canary_obs/runtime/forward.py",
    (
        "        for group, slots in shown.groups:\n            if",
        "        for group, slots in shown.groups[:1]:\n            if",
        _WINDOWS,
    ),
    ("last.steps is not steps or not all(map(operator.is_, steps.values(), last.parts))", "False", _CLEAN),
    (
        "last.steps is not steps or not all(map(operator.is_, steps.values(), last.parts))",
        "last.steps is not steps",
        "tests/runtime/test_owed_slots.py::test_steps_that_are_exchanged_in_place_are_shown",
    ),
    ("            launched.compared += 1\n", "            pass\n", _CLEAN),
    ("            launched.completed += 1\n", "            pass\n", _CLEAN),
    (
        "            launched.begin(shown)\n        if",
        "            launched.shown = shown\n        if",
        _BETWEEN,
    ),
    (
        "for group, batch in self._batches if replay is None else ():",
        "for group, batch in self._batches[:1] if replay is None else ():",
        _WINDOWS,
    ),
)

_SUMS = "tests/runtime/test_launch_account.py::"
LAUNCHED = mutants(
    "canary_obs/runtime/launch_account.py",
    (
        "        self.settle()\n        self.shown = shown",
        "        self.shown = shown",
        _SUMS + "test_sums_are_those_of_each_forward",
    ),
    ("slots * self.completed", "slots", _SUMS + "test_sums_are_those_of_each_forward"),
    ("of_layer * self.completed", "of_layer", _SUMS + "test_sums_are_those_of_each_forward"),
    (
        "        self.compared = self.completed = self.requests = 0\n",
        "",
        _SUMS + "test_nothing_is_added_twice",
    ),
)

SWEEPS = mutants(
    "canary_obs/runtime/sweep/sweeper.py",
    (
        "if not shortfall and current.command.data and uncompared:",
        "if not shortfall and current.command.data and uncompared == seen['comparable']:",
        _OWED + "test_a_sweep_whose_bytes_are_not_compared_fails[one slot of each chunk]",
    ),
)

READER = mutants(
    "canary_obs/runtime/device/counter_reader.py",
    ("            self._owed.expect(sequence)\n", "            self._owed.expect(sequence + 1)\n", _AROUND),
)

PATROL = mutants(
    "canary_obs/runtime/patrol/patrol.py",
    ("            if checked:\n", "            if True:\n", _LESS),
    (
        "                self._checked_at[chunk] = now\n",
        "                self._checked_at = [now] * len(self._checked_at)\n",
        _AGES,
    ),
    ("for chunk in (self._checked, *self._left_out)", "for chunk in (self._checked,)", _AGES),
)

CHECKER = mutants(
    "canary_obs/runtime/patrol/async_checker.py",
    ("max(0, done.slots - _slots_of(row))", "0", _LESS),
)

ALL = RECONCILED + FORWARDS + SWEEPS + READER + PATROL + CHECKER
