"""KV connectors that keep copies of prompts' blocks in this process and load them back."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SIZE = 32
STORE: dict[tuple[int, ...], list[Any]] = {}  # tokens of a prefix -> its last block, layer by layer
_KEPT = 2000  # blocks; the oldest ones go first
LOADS: Counter[str] = Counter()  # "blocks": loaded since the process began


class Transfers(KVConnectorMetadata):
    """Blocks to fill before the forward: (block, its bytes); blocks to keep after it: (prefix, block)."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, list[Any]]] = []
        self.later: dict[str, list[tuple[int, list[Any]]]] = {}  # by request: loads that end in a later step
        self.saves: list[tuple[tuple[int, ...], int]] = []


def _prefixes(tokens: list[int], blocks: list[int], stop: int) -> list[tuple[tuple[int, ...], int]]:
    """Blocks that are full with the first `stop` tokens."""
    full = min(stop, len(tokens)) // SIZE
    return [(tuple(tokens[: (i + 1) * SIZE]), blocks[i]) for i in range(min(full, len(blocks)))]


class CopyingConnector(KVConnectorBase_V1):
    """Both roles in one process; loads before the forward."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: list[Any] = []
        self._matched: dict[str, tuple[int, int]] = {}  # by request: first token of the match, and its end
        self._loads: list[tuple[int, list[Any]]] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, known = list(request.prompt_token_ids), num_computed_tokens
        while known + SIZE < len(tokens) and tuple(tokens[: known + SIZE]) in STORE:
            known += SIZE
        self._matched[request.request_id] = num_computed_tokens, known
        return known - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads += self._loads_of(request, blocks)

    def _loads_of(self, request: Any, blocks: Any) -> list[tuple[int, list[Any]]]:
        """Only what was matched: blocks before it are shared, and may differ in the last bits."""
        start, stop = self._matched[request.request_id]
        tokens, own = list(request.prompt_token_ids), blocks.get_block_ids()[0]
        return [
            (own[order], STORE[tuple(tokens[: (order + 1) * SIZE])])
            for order in range(start // SIZE, -(-stop // SIZE))
        ]

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers = Transfers()
        transfers.loads, self._loads = self._loads, []
        for new in scheduler_output.scheduled_new_reqs:
            stop = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            transfers.saves += _prefixes(new.prompt_token_ids, new.block_ids[0], stop)
        return transfers

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._copy(self._get_connector_metadata().loads)

    def _copy(self, loads: list[tuple[int, list[Any]]]) -> None:
        for block, kept in loads:
            LOADS["blocks"] += 1
            for cache, bytes_kept in zip(self._caches, kept, strict=True):
                cache[block] = bytes_kept

    def wait_for_save(self) -> None:
        for prefix, block in self._get_connector_metadata().saves:
            STORE[prefix] = [cache[block].clone() for cache in self._caches]
        while len(STORE) > _KEPT:
            del STORE[next(iter(STORE))]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done at once."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Saved as a whole."""


class UnalignedConnector(CopyingConnector):
    """A match ends inside a block, and its bytes arrive a step later, while other requests run."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._later: dict[str, list[tuple[int, list[Any]]]] = {}
        self._arriving: dict[str, list[tuple[int, list[Any]]]] = {}  # in the worker
        self._arrived: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if whole == 0:
            return 0, False
        matched = whole - 1 - len(request.prompt_token_ids) % (SIZE - 1)
        self._matched[request.request_id] = (num_computed_tokens, num_computed_tokens + matched)
        return matched, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._later[request.request_id] = self._loads_of(request, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers = super().build_connector_meta(scheduler_output)
        transfers.later, self._later = self._later, {}
        return transfers

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for loads in self._arriving.values():
            self._copy(loads)
        self._arrived |= self._arriving.keys()
        self._arriving = self._get_connector_metadata().later

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None


class UnalignedAtOnce(CopyingConnector):
    """A match ends inside a block, which is loaded whole before the forward."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        matched = max(0, whole - 5)
        self._matched[request.request_id] = (num_computed_tokens, num_computed_tokens + matched)
        return matched, False
