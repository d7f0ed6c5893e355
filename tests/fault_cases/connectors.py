"""Faults of KV that travels through vLLM's connectors, and the tests that plant each in a real engine."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.engines.vllm.real.test_on_v2 import TESTS, TRANSFERS

ROOT = Path(__file__).parents[2]
_REAL = "tests/engines/vllm/real/"
DISK, MEMORY, FILES = "ExampleConnector", "OffloadingConnector, memory", "OffloadingConnector, files"
LMCACHE, NIXL, MOONCAKE, MULTI = "LMCacheConnectorV1", "NixlConnector", "MooncakeConnector", "MultiConnector"
CONNECTORS = (DISK, MEMORY, FILES, LMCACHE, NIXL, MOONCAKE, MULTI)


class Planted(NamedTuple):
    """What is found of a fault, and the test in `tests/engines/vllm/real`; no test = the reason why not."""

    found: str
    test: str = ""

    @property
    def path(self) -> str:
        """Of the test's file, from the root."""
        file = self.test.partition("::")[0]
        return file if "/" in file else _REAL + file

    @property
    def runs(self) -> str:
        """Vllm's model runners on which CI runs it; all of them run on V1."""
        file, _, name = self.test.partition("::")
        if not name or "/" in file:
            return "no engine" if name else ""
        on_v2 = {one.partition("[")[0] for run in (TESTS, TRANSFERS) for one in run.get(file, ())}
        return "V1, V2" if name.removeprefix("test_") in on_v2 else "V1"

    @property
    def exists(self) -> bool:
        """Whether there is such a test, or a reason instead."""
        return not self.test or self.test.partition("::")[2] in _functions(self.path)


@cache
def _functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


_IN_FORWARD = Planted("cannot happen: it loads within the forward, while the blocks are in use")
_BEFORE = Planted("cannot happen: no forward reads what is not complete")
_BY_MEMORY = Planted("as from memory: files are read into it first")
_NO_FILE = Planted("has no file")
_ALL_IN_MULTI = "the same tests: that connector is run within a MultiConnector"
_OWN_MEMORY = Planted("has none: what it knows lies in the worker's memory, by key")
# Records that came along, of a transfer or a key that is another one's.
_REFUSED = {
    NIXL: Planted(
        "refused, unverified", "test_nixl.py::test_records_that_cannot_be_believed_leave_a_receive_unverified"
    ),
    MOONCAKE: Planted(
        "refused, unverified",
        "test_mooncake.py::test_records_that_cannot_be_believed_leave_a_receive_unverified",
    ),
}
_STORE_SHAPES = Planted(
    "unverified: a copy of another share of the heads has another format of records",
    "tests/copy_records/test_stored_copies.py::test_records_of_another_format_are_not_compared",
)

FAULTS: dict[str, dict[str, Planted]] = {
    "a byte flips in the stored copy, or at the sender": {
        DISK: Planted("`kv_data`", "test_disk.py::test_a_byte_that_flips_in_the_file_of_one_layer_is_found"),
        MEMORY: Planted("`kv_data`", "test_offloading.py::test_a_changed_memory_tier_is_found"),
        FILES: Planted("`kv_data`", "test_offloading.py::test_a_byte_that_flips_in_a_file_is_found"),
        LMCACHE: Planted("`kv_data`", "test_lmcache.py::test_a_byte_that_flips_in_a_tier_is_found"),
        NIXL: Planted("`kv_data`", "test_nixl.py::test_damage_at_the_sender_is_found_at_the_receiver"),
        MOONCAKE: Planted(
            "`kv_data`", "test_mooncake.py::test_damage_at_the_sender_is_found_at_the_receiver"
        ),
        MULTI: Planted(
            "`kv_data`, with NIXL",
            "test_nixl.py::test_what_each_connector_of_a_multi_connector_loads_is_compared",
        ),
    },
    "a file is truncated": {
        DISK: Planted(
            "vLLM ends before it is read",
            "test_disk.py::test_a_truncated_file_ends_the_engine_before_it_is_read",
        ),
        MEMORY: _NO_FILE,
        FILES: Planted(
            "a miss, computed again", "test_offloading.py::test_a_truncated_file_is_computed_again"
        ),
        LMCACHE: Planted(
            "`kv_data` (its `fs` tier reports it)",
            "test_lmcache.py::test_a_truncated_file_that_lmcache_takes_for_whole_is_found",
        ),
        NIXL: _NO_FILE,
        MOONCAKE: _NO_FILE,
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
    "a load is reported done, and nothing was copied": {
        DISK: Planted("`lost_load`", "test_disk.py::test_a_load_that_copied_nothing_is_lost"),
        MEMORY: Planted("`lost_load`", "test_offloading.py::test_a_load_that_copied_nothing_is_lost"),
        FILES: _BY_MEMORY,
        LMCACHE: Planted("`lost_load`", "test_lmcache.py::test_a_load_that_copied_nothing_is_lost"),
        NIXL: Planted("`lost_load`", "test_nixl.py::test_a_transfer_that_moved_nothing_is_lost"),
        MOONCAKE: Planted("`lost_load`", "test_mooncake.py::test_bytes_of_elsewhere_or_none_are_found"),
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
    "a load is reported as failed after the forward that read it": {
        DISK: Planted("cannot happen: it reports no failure"),
        MEMORY: Planted("cannot happen: a copy that fails ends vLLM"),
        FILES: Planted("cannot happen: a file that cannot be read is a miss"),
        LMCACHE: Planted(
            "V1: nothing, computed again; V2: `position`, as vLLM computes it wrong",
            "test_lmcache.py::test_a_truncated_file_that_lmcache_reports_is_computed_again",
        ),
        NIXL: _BEFORE,
        MOONCAKE: _BEFORE,
        MULTI: Planted("as its connectors: any connector is run in `test_failed_loads.py`, on V1 and V2"),
    },
    "blocks of another request come": {
        DISK: Planted("`kv_data`", "test_disk.py::test_layers_of_another_prompt_are_found"),
        MEMORY: Planted("`kv_data`", "test_offloading.py::test_a_changed_memory_tier_is_found"),
        FILES: Planted("`kv_data`", "test_offloading.py::test_files_that_change_places_are_found"),
        LMCACHE: Planted("`kv_data`", "test_lmcache.py::test_chunks_that_change_places_are_found"),
        NIXL: Planted("`kv_data`", "test_nixl.py::test_blocks_of_another_request_are_found"),
        MOONCAKE: Planted("`kv_data`", "test_mooncake.py::test_bytes_of_elsewhere_or_none_are_found"),
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
    "a layer comes from another request, or another block": {
        DISK: Planted("`kv_data`", "test_disk.py::test_layers_of_another_prompt_are_found"),
        MEMORY: Planted("`kv_data`", "test_offloading.py::test_a_changed_memory_tier_is_found"),
        FILES: Planted("`kv_data`", "test_offloading.py::test_files_that_change_places_are_found"),
        LMCACHE: Planted("`kv_data`", "test_lmcache.py::test_a_layer_of_another_chunk_is_found"),
        NIXL: Planted("`kv_data`", "test_nixl.py::test_a_layer_of_other_blocks_is_found"),
        MOONCAKE: Planted("`kv_data`", "test_mooncake.py::test_bytes_of_elsewhere_or_none_are_found"),
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
    "a transfer is reordered": {
        DISK: Planted("`kv_data`", "test_disk.py::test_layers_that_change_places_are_found"),
        MEMORY: Planted("`kv_data`", "test_offloading.py::test_a_changed_memory_tier_is_found"),
        FILES: Planted("`kv_data`", "test_offloading.py::test_files_that_change_places_are_found"),
        LMCACHE: Planted("`kv_data`", "test_lmcache.py::test_chunks_that_change_places_are_found"),
        NIXL: Planted("`kv_data`", "test_nixl.py::test_blocks_of_other_places_are_found"),
        MOONCAKE: Planted("`kv_data`", "test_mooncake.py::test_bytes_of_elsewhere_or_none_are_found"),
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
    "a receive lands when its blocks were freed": {
        DISK: _IN_FORWARD,
        MEMORY: Planted(
            "`kv_data`, by the patrol",
            "test_offloading.py::test_bytes_that_arrive_when_the_blocks_belong_to_others_are_found",
        ),
        FILES: _BY_MEMORY,
        LMCACHE: _IN_FORWARD,
        NIXL: Planted(
            "`kv_data`", "test_nixl.py::test_a_receive_that_lands_when_its_blocks_were_freed_is_found"
        ),
        MOONCAKE: Planted(
            "`kv_data`", "test_mooncake.py::test_a_receive_that_lands_when_its_blocks_were_freed_is_found"
        ),
        MULTI: Planted(
            "`kv_data`, with NIXL",
            "test_nixl.py::test_a_receive_in_a_multi_connector_that_lands_when_its_blocks_were_freed_is_found",
        ),
    },
    "the sender gave up waiting and used the blocks again": {
        NIXL: Planted(
            "`kv_data`",
            "test_nixl.py::test_a_sender_that_gave_up_waiting_and_used_the_blocks_again_is_found",
        ),
        MOONCAKE: Planted(
            "`kv_data`",
            "test_mooncake.py::test_a_sender_that_gave_up_waiting_and_used_the_blocks_again_is_found",
        ),
    },
    "two tensor-parallel shapes": {
        DISK: _STORE_SHAPES,
        MEMORY: Planted("cannot happen: the tier ends with its engine"),
        FILES: _STORE_SHAPES,
        LMCACHE: _STORE_SHAPES,
        NIXL: Planted(
            "compared: two ranks to one", "test_nixl.py::test_what_two_ranks_send_is_what_one_receives"
        ),
        MOONCAKE: Planted(
            "compared: two ranks to one; unverified: one to two",
            "test_mooncake.py::test_what_two_ranks_send_is_what_one_receives",
        ),
        MULTI: Planted("as NixlConnector: the same test, which runs within a MultiConnector on V1"),
    },
    "the records are of an earlier copy": {
        DISK: Planted("`kv_data`", "test_disk.py::test_only_records_that_can_be_believed_are_compared"),
        MEMORY: _OWN_MEMORY,
        FILES: Planted("`kv_data`", "test_offloading.py::test_a_stale_record_file_accuses_the_copy"),
        LMCACHE: Planted("`kv_data`", "test_lmcache.py::test_only_records_that_can_be_believed_are_compared"),
        **_REFUSED,
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
    "the records are lost": {
        DISK: Planted("unverified", "test_disk.py::test_only_records_that_can_be_believed_are_compared"),
        MEMORY: _OWN_MEMORY,
        FILES: Planted("unverified", "test_offloading.py::test_without_its_record_file_a_load_is_unverified"),
        LMCACHE: Planted(
            "unverified", "test_lmcache.py::test_only_records_that_can_be_believed_are_compared"
        ),
        NIXL: Planted(
            "unverified", "test_nixl.py::test_records_that_cannot_be_believed_leave_a_receive_unverified"
        ),
        MOONCAKE: Planted(
            "unverified", "test_mooncake.py::test_records_that_cannot_be_believed_leave_a_receive_unverified"
        ),
        MULTI: Planted(
            "unverified, with NIXL",
            "test_nixl.py::test_what_each_connector_of_a_multi_connector_loads_is_compared",
        ),
    },
    "the records are forged": {
        DISK: Planted(
            "refused, unverified", "test_disk.py::test_only_records_that_can_be_believed_are_compared"
        ),
        MEMORY: _OWN_MEMORY,
        FILES: Planted("refused, unverified", "test_offloading.py::test_a_forged_record_file_is_refused"),
        LMCACHE: Planted(
            "refused, unverified", "test_lmcache.py::test_only_records_that_can_be_believed_are_compared"
        ),
        **_REFUSED,
        MULTI: Planted(f"as ExampleConnector: {_ALL_IN_MULTI}"),
    },
}
