"""Defects seeded in the comparison of tables that attention was given with the runner's."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TABLES = "tests/engines/vllm/test_attention_tables.py::test_"
_ACCOUNT = "tests/runtime/test_table_account.py::test_"

COMPARED = mutants(
    "canary_obs/engines/vllm/attention_tables.py",
    (
        "        if tables:\n",
        "        if False:\n",
        _TABLES + "another_table_is_shown_instead_of_the_runners",
    ),
    (
        "        if others:\n",
        "        if False:\n",
        _TABLES + "another_mapping_is_shown_instead_of_the_runners",
    ),
    (
        "_distinct(metadata), _distinct(mappings)",
        "_distinct(metadata), _distinct(())",
        _TABLES + "another_mapping_is_shown_instead_of_the_runners",
    ),
    (
        "    if len(set(map(id, found))) < 2:\n",
        "    if found:\n",
        _TABLES + "another_table_is_shown_instead_of_the_runners",
    ),
    (
        "        and len(set(map(id, metadata))) == 1\n",
        "",
        _TABLES + "another_table_is_shown_instead_of_the_runners",
    ),
    (
        "        and table.stride() == own.stride()\n",
        "",
        _TABLES + "a_wrong_part_is_seen_in_its_rows",
    ),
    (
        "        and table.shape[1] == own.shape[1]\n",
        "",
        _TABLES + "what_cannot_be_compared_is_not_counted",
    ),
    (
        "        and (slots is None or slots.data_ptr() == slots_at)\n",
        "",
        _TABLES + "another_mapping_is_shown_instead_of_the_runners",
    ),
    (
        " and mappings[0].data_ptr() == slots_at",
        "",
        _TABLES + "another_mapping_is_shown_instead_of_the_runners",
    ),
    ("start + first * row", "start", _TABLES + "the_runners_own_tensors_are_shown_as_they_are"),
    (
        "    return any(\n        part.data_ptr()",
        "    return all(\n        part.data_ptr()",
        _TABLES + "a_wrong_part_is_seen_in_its_rows",
    ),
    (
        "        if prefill is not None:\n",
        "        if prefill is None:\n",
        _TABLES + "a_wrong_part_is_seen_in_its_rows",
    ),
    (
        "            if complete:\n",
        "            if True:\n",
        _TABLES + "what_cannot_be_compared_is_not_counted",
    ),
    (
        "                continue\n",
        "                step = steps[name]\n                complete = True\n",
        _TABLES + "what_cannot_be_compared_is_not_counted",
    ),
    (
        "    if not parts:\n",
        "    if False:\n",
        _TABLES + "what_cannot_be_compared_is_not_counted",
    ),
)

ACCOUNT = mutants(
    "canary_obs/runtime/table_account.py",
    (
        "self._checked[name] - found.forwards",
        "max(0, found.forwards - self._checked[name])",
        _ACCOUNT + "forwards_that_are_not_compared_are_named",
    ),
    (
        "(gap is None or (name, gap) not in self._accepted)",
        "gap is not None",
        _ACCOUNT + "forwards_that_are_not_compared_are_named",
    ),
    (
        "(name, gap) not in self._accepted",
        "not self._accepted",
        _ACCOUNT + "a_cause_that_was_acknowledged_stays_so",
    ),
)

ALL = *COMPARED, *ACCOUNT
