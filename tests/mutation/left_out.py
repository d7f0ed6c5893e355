"""Defects of what is left out of the checks, and of what that does to the groups beside it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_CHANGES = "tests/engines/vllm/test_block_changes.py::"
_LEFT_OUT = "tests/engines/vllm/test_left_out.py::"

CHANGES = mutants(
    "canary_obs/engines/vllm/block_changes.py",
    (
        "for number in self._numbers\n",
        "for number in [group.number for group in self._groups]\n",
        _CHANGES + "test_a_block_handed_to_a_group_left_out_ends_the_records_of_the_others",
    ),
    (
        "                found[event.group].add(event.block)\n",
        "                pass\n",
        _CHANGES
        + "test_what_a_connector_fills_in_a_group_left_out_ends_records_before_its_request_is_scheduled",
    ),
)

LEFT_OUT = mutants(
    "canary_obs/engines/vllm/left_out.py",
    (
        "if reasons and not found:",
        "if False:",
        _LEFT_OUT + "test_only_an_engine_of_which_nothing_is_left_is_refused",
    ),
)

ALL = CHANGES + LEFT_OUT
