"""Seeded defects of who loads what was computed from damage."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_COPIES = "tests/runtime/taint/test_copies.py::"

ALL = (
    *mutants(
        "canary_obs/runtime/taint/copies.py",
        (
            "not stored.whole or readers.fill_whole(readings)",
            "not stored.whole",
            _COPIES + "test_a_copy_makes_nothing_doubtful_that_a_listed_request_sent_before",
        ),
        (
            "not stored.whole or readers.fill_whole(readings)",
            "readers.fill_whole(readings)",
            _COPIES + "test_a_part_of_a_block_may_be_stored_as_soon_as_it_is_read",
        ),
        (
            "        for damage in whole:\n",
            "        for damage in ():\n",
            _COPIES + "test_what_a_reader_filled_whole_may_be_loaded_again_by_others",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/damage.py",
        (
            "return self.cause is not None and not self.copied",
            "return self.cause is not None",
            _COPIES + "test_a_copy_makes_nothing_doubtful_that_a_listed_request_sent_before",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/lives.py",
        (
            "return RUNNING if emitted is None or self.drafting else",
            "return RUNNING if self.drafting else",
            _COPIES + "test_the_last_block_of_a_reader_that_ended_may_be_whole",
        ),
        (
            "return RUNNING if emitted is None or self.drafting else",
            "return RUNNING if emitted is None else",
            _COPIES + "test_drafted_tokens_may_have_filled_the_last_block",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/reading.py",
        (
            "filled_since(lives, computed // tokens + 1)",
            "filled_since(lives, computed // tokens + 2)",
            _COPIES + "test_a_block_more_fills_the_one_before_for_each_damage_that_its_request_read",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/copies.py",
        (
            "                        watch.set(name, block, damage.number)\n",
            "                        pass\n",
            _COPIES + "test_who_joins_a_copy_of_what_a_reader_filled_is_listed",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/reading.py",
        (
            "                    waiting += [Reading(life, step, True) for life, step in joined]\n",
            "",
            _COPIES + "test_who_joins_a_copy_of_what_a_reader_filled_is_listed",
        ),
        (
            "filled[name].append(as_blocks(there))",
            "pass",
            _COPIES + "test_who_joins_a_copy_of_what_a_reader_filled_is_listed",
        ),
        (
            "*(stored.forgotten_until for stored in self.stored.values()), -1)",
            "-1)",
            _COPIES + "test_copies_that_are_forgotten_are_never_nobody",
        ),
        (
            "reading is not None and number >= int(self.computed([reading])[1][0]) // tokens",
            "reading is not None",
            _COPIES
            + "test_what_a_reader_had_filled_before_it_read_damage_is_joined_from_a_copy_by_nobody_tainted",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/stored_blocks.py",
        (
            "            return self._loads[block, max(loads)]\n",
            "            pass\n",
            _COPIES + "test_a_copy_of_a_copy_is_followed_to_who_filled_it",
        ),
        (
            "loads = [other for other in self._into[block] if other > start]",
            "loads = list[int]()",
            _COPIES + "test_a_copy_that_is_written_over_by_another_is_joined_no_more",
        ),
    ),
    *mutants(
        "canary_obs/engines/reference/request_changes.py",
        (
            "ChangedRequests(loaded={_SLOTS: KeyedBlocks(keys, slots)})",
            "ChangedRequests()",
            "tests/runtime/test_host_tier.py::test_who_loads_what_was_computed_from_damage_is_listed",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/connector_reports.py",
        (
            "set(class_names(connector)) - _WITHOUT_STORE",
            "set(class_names(connector))",
            "tests/engines/vllm/test_connector_reports.py::test_where_blocks_may_be_stored",
        ),
        (
            "whole=stores <= _OF_WHOLE_BLOCKS",
            "whole=True",
            "tests/engines/vllm/test_connector_reports.py::test_where_blocks_may_be_stored",
        ),
    ),
)
