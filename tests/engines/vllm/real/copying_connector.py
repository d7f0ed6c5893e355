"""A KV connector that keeps copies of prompts' blocks in this process and loads them back."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SIZE = 32
STORE: dict[tuple[int, ...], list[Any]] = {}  # tokens of a prefix -> its last block, layer by layer
LOADS: Counter[str] = Counter()  # "blocks": loaded since the process began


class Transfers(KVConnectorMetadata):
    """Blocks to fill before the forward, blocks to keep after it: (tokens of the prefix, block)."""

    def __init__(self) -> None:
        self.loads: list[tuple[tuple[int, ...], int]] = []
        self.saves: list[tuple[tuple[int, ...], int]] = []


def _prefixes(tokens: list[int], blocks: list[int]) -> list[tuple[tuple[int, ...], int]]:
    full = len(tokens) // SIZE
    return [(tuple(tokens[: (i + 1) * SIZE]), blocks[i]) for i in range(min(full, len(blocks)))]


class CopyingConnector(KVConnectorBase_V1):
    """Both roles in one process."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: list[Any] = []
        self._loads: list[tuple[tuple[int, ...], int]] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, known = list(request.prompt_token_ids), num_computed_tokens
        while known + SIZE < len(tokens) and tuple(tokens[: known + SIZE]) in STORE:
            known += SIZE
        return known - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            pairs = _prefixes(list(request.prompt_token_ids), blocks.get_block_ids()[0])
            self._loads += [pair for pair in pairs if pair[0] in STORE]

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers = Transfers()
        transfers.loads, self._loads = self._loads, []
        for new in scheduler_output.scheduled_new_reqs:
            transfers.saves += _prefixes(new.prompt_token_ids, new.block_ids[0])
        return transfers

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for prefix, block in self._get_connector_metadata().loads:
            LOADS["blocks"] += 1
            for cache, kept in zip(self._caches, STORE[prefix], strict=True):
                cache[block] = kept

    def wait_for_save(self) -> None:
        for prefix, block in self._get_connector_metadata().saves:
            STORE[prefix] = [cache[block].clone() for cache in self._caches]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done at once."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Saved as a whole."""
