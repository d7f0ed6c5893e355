"""Which fault classes also run on a real vLLM: planted in its own tensors, tables and methods."""

from __future__ import annotations

from typing import NamedTuple

_V1 = "engines/vllm/real/test_faults.py:"
_TOKENS = "test_wrong_tokens_are_found_and_comparisons_that_do_not_run"
_TABLES = "test_tables_that_are_not_the_runners"
_CONNECTORS = "engines/vllm/real/test_connectors.py:"
_HIT = "test_a_damaged_block_is_seen_in_the_step_that_hits_it"


class VllmRun(NamedTuple):
    """A class of `cases` and the test, as path:name below `tests`, that plants it in vLLM."""

    case: str
    runner: str
    test: str


RUNS = (
    VllmRun("bit_flip", "V1", _V1 + "test_one_bit_in_every_layer_and_part_of_an_idle_block"),
    VllmRun("bit_flip", "V1", _V1 + "test_one_bit_in_every_layer_and_part_of_a_block_in_use"),
    VllmRun("bit_flip", "V1", "engines/vllm/real/test_accounts.py:" + _HIT),
    VllmRun("bit_flip", "V2", "engines/vllm/real/test_v2.py:" + _HIT),
    VllmRun("missing_layer", "V1", _V1 + "test_copy_that_skips_the_last_layer"),
    VllmRun("racing_copy", "V1", _CONNECTORS + "test_bytes_that_arrive_after_they_were_reported_are_found"),
    VllmRun("row_mix_up", "V1", _V1 + "test_rows_exchanged"),
    VllmRun("row_mix_up", "V2", "engines/vllm/real/test_v2.py:test_clean_and_faults"),
    VllmRun("slot_off_by_one", "V1", _V1 + "test_slot_mapping_off_by_one"),
    VllmRun("stale_page", "V1", _V1 + "test_freed_block_handed_to_a_second_request"),
    VllmRun("stale_row", "V1", _V1 + "test_table_entry_of_another_request"),
    VllmRun("stale_row", "V1", "engines/vllm/real/test_accounts.py:" + _TABLES),
    VllmRun("stale_row", "V2", "engines/vllm/real/test_v2.py:" + _TABLES),
    VllmRun("swapped_inputs", "V1, also asynchronous", "engines/vllm/real/test_tokens.py:" + _TOKENS),
    VllmRun("swapped_inputs", "V2", "engines/vllm/real/test_v2.py:" + _TOKENS),
    VllmRun("zeroed_page", "V1", _V1 + "test_page_zeroed"),
    VllmRun("zeroed_page", "V2", "engines/vllm/real/test_v2.py:test_clean_and_faults"),
    VllmRun("zeroed_page", "V2, draft layers", "engines/vllm/real/test_v2.py:test_draft_layers"),
)  # fmt: skip
