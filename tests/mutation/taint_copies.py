"""Seeded defects of who loads what was computed from damage."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_OFFLOADS = "tests/engines/vllm/test_offload_records.py::"
_COPIES = "tests/runtime/taint/test_copies.py::"
_SHOWN = "tests/runtime/taint/test_shown_copies.py::"

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
            "                watch.set(name, loaded.blocks, marks)\n",
            "",
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
            "return int(self.computed([reading])[1][0]) // self.tokens[name]",
            "return 0",
            _COPIES
            + "test_what_a_reader_had_filled_before_it_read_damage_is_joined_from_a_copy_by_nobody_tainted",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/stored_blocks.py",
        (
            "            return self._copies[Copy(block, max(loads))]\n",
            "            pass\n",
            _COPIES + "test_a_copy_of_a_copy_is_followed_to_who_filled_it",
        ),
        (
            "loads = [other for other in self._loads.get(block, ()) if other > loaded]",
            "loads = list[int]()",
            _COPIES + "test_a_copy_that_is_written_over_by_another_is_joined_no_more",
        ),
        (
            "return self._copies.get(Copy(block, came), UNKNOWN)",
            "pass",
            _SHOWN + "test_a_copy_of_what_a_request_began_with_is_followed_to_who_filled_it",
        ),
        (
            "came >= 0) & ~self._fills.are_filled_since(blocks, came)",
            "came >= 0)",
            _SHOWN + "test_a_request_that_begins_in_a_block_that_was_filled_since_its_load_reads_no_copy",
        ),
        (
            "until = self._until(block, begun, begun)",
            "until = None",
            _SHOWN + "test_what_a_request_began_with_is_joined_until_its_block_is_filled_anew",
        ),
        (
            "reads = joins | (starts == begun)",
            "reads = joins",
            _SHOWN + "test_for_whom_a_copy_was_loaded_is_listed",
        ),
        (
            "self._until(block, start, start - 1)",
            "self._until(block, start, start)",
            _SHOWN + "test_a_block_that_is_given_to_others_as_it_is_stored",
        ),
        (
            "for start in self._loads.get(block, ()) if filled < start <= step + 1]",
            "for start in self._loads.get(block, ()) if filled <= start <= step + 1]",
            _SHOWN + "test_a_block_that_is_given_to_others_as_it_is_stored",
        ),
        (
            "max(self._loads.get(block, (-1,))) > filled",
            "False",
            _SHOWN + "test_a_clean_copy_in_a_block_that_held_damage_is_read_by_nobody_tainted",
        ),
        (
            "                self._absent = UNKNOWN\n                continue\n",
            "                continue\n",
            _SHOWN + "test_a_copy_of_which_nobody_knows_makes_it_unknown_who_reads",
        ),
        (
            "                self.forgotten_until = max(self.forgotten_until, start)\n            self._add",
            "                pass\n            self._add",
            _SHOWN + "test_a_copy_of_which_nobody_knows_makes_it_unknown_who_reads",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/last_fills.py",
        (
            "found = np.where(last <= step, last, np.where(before <= step, before, UNKNOWN))",
            "found = last",
            _SHOWN + "test_a_block_that_is_given_to_others_as_it_is_stored",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/watch.py",
        (
            "        self._damage[table][copies] = kept\n",
            "",
            "tests/runtime/taint/test_loaded_copies.py::test_who_reads_bad_copies_is_listed_and_nobody_else",
        ),
    ),
    *mutants(
        "canary_obs/runtime/taint/copies.py",
        (
            "known = UNKNOWN not in origins and len(fillers) == len(contents)",
            "known = UNKNOWN not in origins",
            _SHOWN + "test_a_copy_of_which_nobody_knows_makes_it_unknown_who_reads",
        ),
        (
            "is not None and not stored.shown:",
            "is not None:",
            _SHOWN + "test_where_all_copies_are_shown_nobody_is_missing",
        ),
        (
            "by_records = row.reason is Reason.KV_DATA and (",
            "by_records = True or (",
            _SHOWN + "test_copies_of_damage_that_no_load_would_find",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/offload_records.py",
        (
            "compared = (0 < len(folds) <= MOST for folds in found)",
            "compared = (True for folds in found)",
            _OFFLOADS + "test_who_may_load_damage_is_shown_without_a_key",
        ),
        (
            "            self._show_requests()\n            stored",
            "            stored",
            _OFFLOADS + "test_what_the_step_has_changed_is_shown_first[stored]",
        ),
        (
            "            self._show_requests()\n            lost",
            "            lost",
            _OFFLOADS + "test_what_the_step_has_changed_is_shown_first[loaded]",
        ),
        (
            "ChangedRequests(loaded=lost or loaded)",
            "ChangedRequests(loaded=loaded)",
            _OFFLOADS + "test_blocks_without_keys_are_shown_as_unknown",
        ),
        (
            "ChangedRequests(stored=self._unknown(unnamed) or stored)",
            "ChangedRequests(stored=stored)",
            _OFFLOADS + "test_blocks_without_keys_are_shown_as_unknown",
        ),
        (
            'and not getattr(worker.spec, "secondary_tier_configs", ())',
            "and True",
            _OFFLOADS + "test_only_what_one_rank_keeps_in_memory_is_followed",
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
