"""Defects of what is left out of the checks, and of what that does to the groups beside it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_CHANGES = "tests/engines/vllm/test_block_changes.py::"
_LEFT_OUT = "tests/engines/vllm/test_left_out.py::"

GIVEN_UP = mutants(
    "canary_obs/engines/toolkit/block_slots.py",
    (
        "    observer.before_load(group, slots)\n",
        "",
        "tests/engines/toolkit/test_block_slots.py::test_bytes_are_compared_before_their_records_are_emptied",
    ),
    (
        "    observer.invalidated(group, slots)\n",
        "",
        _CHANGES + "test_a_state_that_a_connector_fills_has_no_record",
    ),
)

CHANGES = mutants(
    "canary_obs/engines/vllm/block_changes.py",
    (
        "                observer.before_load(name, destination)\n",
        "",
        _CHANGES + "test_what_a_copy_of_a_block_is_written_over_is_compared_before",
    ),
    (
        "for number in self._numbers\n",
        "for number in [group.number for group in self._groups]\n",
        _CHANGES + "test_a_block_handed_to_a_group_left_out_ends_the_records_of_the_others",
    ),
    (
        "            found[load.group].update(load.blocks)\n",
        "            pass\n",
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

_RANKS = "tests/engines/vllm/test_context_parallel.py::"
RANKS = mutants(
    "canary_obs/engines/vllm/context_parallel.py",
    (
        'any(getattr(spec, "dcp_sharded", True) for',
        'any(getattr(spec, "dcp_sharded", False) for',
        _RANKS + "test_a_group_whose_tokens_are_spread_over_ranks_is_not_followed",
    ),
    (
        "size == 1 or keeps_states(specs)",
        "size == 1",
        _RANKS + "test_a_group_that_each_rank_keeps_whole_is_followed",
    ),
)

_ENTRIES = "tests/engines/vllm/test_compressed.py::"
ENTRIES = mutants(
    "canary_obs/engines/vllm/compressed.py",
    (
        "return 1 if found == -1 else found",
        "return 1",
        _ENTRIES + "test_slots_that_are_not_tokens_are_not_taken_for_them",
    ),
    (
        "[found[kind] for kind in sorted(found)]",
        "list(found.values())",
        _ENTRIES + "test_layers_of_one_group_are_told_apart",
    ),
    (
        '"a KV connector": getattr',
        '"a KV connector": None and getattr',
        _ENTRIES + "test_entries_that_cannot_be_followed_are_left_out",
    ),
)

_STEPS = "tests/engines/vllm/test_entry_steps.py::"
STEPS = mutants(
    "canary_obs/engines/vllm/entry_steps.py",
    (
        "(entries + 1) * ratio - 1",
        "entries * ratio",
        _STEPS + "test_an_entry_is_complete_with_the_last_token_of_its_run",
    ),
    (
        "if start <= first[place]:",
        "if True:",
        _STEPS + "test_a_request_that_comes_back_is_computed_anew",
    ),
    (
        "batch.tokens[place][before - before % ratio : before]",
        "batch.tokens[place][before : before + before % ratio]",
        _STEPS + "test_chunks_write_what_one_forward_writes",
    ),
)

_WRITES = "tests/engines/vllm/test_compressors.py::"
WRITES = mutants(
    "canary_obs/engines/vllm/compressors.py",
    (
        "        cache.kv_cache = self._scratch\n",
        "",
        _WRITES + "test_an_entry_is_its_elements_and_its_scales",
    ),
    ("if len(found) != 1:", "if not found:", _WRITES + "test_what_cannot_be_confirmed_is_left_out"),
)

_STATES = "tests/engines/vllm/test_states.py::"
STATES = mutants(
    "canary_obs/engines/vllm/states.py",
    (
        "if before and source != destination:",
        "if False:",
        _STATES + "test_a_state_moves_where_its_next_token_lies_in_another_block",
    ),
    (
        "if destination - 1 > source and blocks",
        "if destination > source and blocks",
        _STATES + "test_a_state_from_the_prefix_cache_is_copied_to_the_requests_own_block",
    ),
    (
        "out=self._ends[:count]).sub_(1)",
        "out=self._ends[:count])",
        _STATES + "test_each_request_rewrites_the_state_in_the_block_of_its_last_token",
    ),
)

_SCALES = "tests/engines/vllm/test_scales.py::"
SCALES = mutants(
    "canary_obs/engines/vllm/scales.py",
    (
        "        self.refresh()\n        if any",
        "        if any",
        _SCALES + "test_what_python_holds_is_taken_up_before_each_forward",
    ),
)

_INDEX_KEYS = "tests/engines/vllm/test_index_keys.py::"
INDEX_KEYS = mutants(
    "canary_obs/kv_locations/split_pages.py",
    (
        "if elsewhere or not own",
        "if False and not own",
        _INDEX_KEYS + "test_keys_that_lie_elsewhere_are_left_out",
    ),
    (
        "            probed.copy_(saved)",
        "            pass",
        _INDEX_KEYS + "test_keys_that_lie_elsewhere_are_left_out",
    ),
)

_PACKED = "tests/engines/vllm/test_packed_windows.py::"
PACKED = mutants(
    "canary_obs/engines/vllm/packed_windows.py",
    ("if layer.bounded_replay:", "if False:", _PACKED + "test_windows_that_are_computed_again_are_left_out"),
    ("if len(writers) != 1:", "if not writers:", _PACKED + "test_what_cannot_be_confirmed_is_left_out"),
)

ALL = GIVEN_UP + CHANGES + LEFT_OUT + RANKS + ENTRIES + STEPS + WRITES + STATES + SCALES + INDEX_KEYS + PACKED
