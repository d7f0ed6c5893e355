"""Which fault classes also run on real vLLM and SGLang: planted in their own tensors, tables and methods."""

from __future__ import annotations

from typing import NamedTuple

_V1 = "engines/vllm/real/test_faults.py:"
_TOKENS = "test_wrong_tokens_are_found_and_comparisons_that_do_not_run"
_TABLES = "test_tables_that_are_not_the_runners"
_CONNECTORS = "engines/vllm/real/test_connectors.py:"
_LATE = "test_bytes_that_arrive_after_they_were_reported_are_found"
_SGLANG = "engines/sglang/real/test_faults.py:"
_HIT = "test_a_damaged_block_is_seen_in_the_step_that_hits_it"


class EngineRun(NamedTuple):
    """A class of `cases` and the test, as path:name below `tests`, that plants it in the engine."""

    case: str
    engine: str
    test: str


RUNS = (
    EngineRun("bit_flip", "vLLM V1", _V1 + "test_one_bit_in_every_layer_and_part_of_an_idle_block"),
    EngineRun("bit_flip", "vLLM V1", _V1 + "test_one_bit_in_every_layer_and_part_of_a_block_in_use"),
    EngineRun("bit_flip", "vLLM V1", "engines/vllm/real/test_accounts.py:" + _HIT),
    EngineRun("bit_flip", "vLLM V2", "engines/vllm/real/test_v2.py:" + _HIT),
    EngineRun("missing_layer", "vLLM V1", _V1 + "test_copy_that_skips_the_last_layer"),
    EngineRun("racing_copy", "vLLM V1", _CONNECTORS + _LATE),
    EngineRun("row_mix_up", "vLLM V1", _V1 + "test_rows_exchanged"),
    EngineRun("row_mix_up", "vLLM V2", "engines/vllm/real/test_v2.py:test_clean_and_faults"),
    EngineRun("slot_off_by_one", "vLLM V1", _V1 + "test_slot_mapping_off_by_one"),
    EngineRun("stale_page", "vLLM V1", _V1 + "test_freed_block_handed_to_a_second_request"),
    EngineRun("stale_row", "vLLM V1", _V1 + "test_table_entry_of_another_request"),
    EngineRun("stale_row", "vLLM V1", "engines/vllm/real/test_accounts.py:" + _TABLES),
    EngineRun("stale_row", "vLLM V2", "engines/vllm/real/test_v2.py:" + _TABLES),
    EngineRun("swapped_inputs", "vLLM V1, also asynchronous", "engines/vllm/real/test_tokens.py:" + _TOKENS),
    EngineRun("swapped_inputs", "vLLM V2", "engines/vllm/real/test_v2.py:" + _TOKENS),
    EngineRun("zeroed_page", "vLLM V1", _V1 + "test_page_zeroed"),
    EngineRun("zeroed_page", "vLLM V2", "engines/vllm/real/test_v2.py:test_clean_and_faults"),
    EngineRun("zeroed_page", "vLLM V2, draft layers", "engines/vllm/real/test_v2.py:test_draft_layers"),
    EngineRun("bit_flip", "SGLang", _SGLANG + "test_a_bit_of_a_running_request_flips"),
    EngineRun("bit_flip", "SGLang", _SGLANG + "test_a_bit_of_a_cached_slot_flips"),
    EngineRun("bit_flip", "SGLang, window pool", _SGLANG + "test_a_bit_of_a_window_slot_flips"),
    EngineRun("slot_off_by_one", "SGLang", _SGLANG + "test_faults_of_the_inputs"),
    EngineRun("stale_page", "SGLang", _SGLANG + "test_faults_of_the_tables"),
    EngineRun("stale_row", "SGLang", _SGLANG + "test_faults_of_the_tables"),
    EngineRun("stale_translation", "SGLang, window pool", _SGLANG + "test_faults_of_the_windows"),
)  # fmt: skip
