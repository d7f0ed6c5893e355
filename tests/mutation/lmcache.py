"""Defects of following what LMCache stores and loads; killed by tests without an engine."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_RECORDS = "tests/engines/vllm/test_lmcache_records.py::"
_LOADS = "tests/engines/vllm/test_connector_loads.py::"
_STORED = "tests/copy_records/test_stored_copies.py::"

ALL = (
    *mutants(
        "canary_obs/engines/vllm/forward_stores.py",
        (
            "        if self._ended:",
            "        if False:",
            _RECORDS + "test_what_is_stored_when_the_forward_has_ended_is_known_a_step_later",
        ),
        (
            "self._stores, self._ended = [], False",
            "self._stores = []",
            _RECORDS + "test_a_forward_that_failed_after_one_that_ended_has_stored_nothing",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/lmcache_records.py",
        (
            "known.get((name, place))",
            "known.get((name, 0))",
            _RECORDS + "test_a_load_is_compared_with_what_its_chunk_was_stored_as",
        ),
        (
            "if slots is None or start % size:",
            "if slots is None:",
            _RECORDS + "test_blocks_that_a_chunk_does_not_hold_whole_are_not_compared",
        ),
        (
            "copied is not None and copied[0] is objects:",
            "copied is not None:",
            _RECORDS + "test_what_is_put_without_being_copied_is_not_known",
        ),
        (
            "existed = existed and not self._stored.described(",
            "existed = not self._stored.described(",
            _RECORDS + "test_records_lie_next_to_shared_files",
        ),
        (
            "first = cached // chunk * chunk",
            "first = 0",
            _RECORDS + "test_a_chunk_is_compared_in_the_blocks_that_were_cached",
        ),
        (
            "if engine.config.enable_blending or engine.config.use_layerwise:",
            "if engine.config.enable_blending:",
            _RECORDS + "test_what_other_tiers_hold_is_not_known",
        ),
        (
            "len(others) == len(list(_file_tiers(engine))) <= 1",
            "len(list(_file_tiers(engine))) <= 1",
            _RECORDS + "test_what_other_tiers_hold_is_not_known",
        ),
        (
            'and type(getattr(backend, "serializer", None)).__name__ == _EXACT',
            "and True",
            _RECORDS + "test_what_other_tiers_hold_is_not_known",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/forward_stores.py",
        (
            "existed.get(store.named, True) and store.existed",
            "store.existed",
            _RECORDS + "test_a_chunk_that_two_requests_store_in_one_step_has_a_record",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/connector_loads.py",
        (
            "self.landing[load] = list(blocks), len(tokens) // 4",
            "self._waiting[load] = list(blocks)",
            _LOADS + "test_blocks_that_are_written_again_arrive_with_the_step",
        ),
    ),
    *mutants(
        "canary_obs/copy_records/stored_copies.py",
        (
            "(self._rewritten or not filed)",
            "(not filed)",
            _STORED + "test_where_files_are_replaced_what_others_say_is_read_each_time",
        ),
        (
            "(known is not None and known.filed) or",
            "False or",
            _STORED + "test_a_file_is_described_once_its_record_waits_to_be_written",
        ),
    ),
)
