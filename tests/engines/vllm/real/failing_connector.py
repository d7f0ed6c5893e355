"""A KV connector whose loads fail as a test says: wholly, in one block, or with copies that come late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.engines.vllm.real.copying_connector import STORE, CopyingConnector, UnalignedConnector

Copy = tuple[int, list[Any]]  # block, and its bytes layer by layer


@dataclass
class Failures:
    """What happens to the next loads; `held`: copies that were not made."""

    fail: str = ""  # "request" or "block"; empty = nothing fails
    forget: bool = False  # what failed is not there any more when it is asked for again
    at_once: bool = False  # loads are made before the forward of the step in which they are asked for
    hold: bool = False  # the next load is under way, and nobody hears of it
    held: list[Copy] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)  # requests whose loads are held
    caches: list[Any] = field(default_factory=list)

    def land(self) -> None:
        """Make the copies that were held."""
        held, self.held = self.held, []
        for block, kept in held:
            for cache, bytes_kept in zip(self.caches, kept, strict=True):
                cache[block] = bytes_kept


FAILURES = Failures()
BAD = 2  # of a load's blocks, the one that fails


class FailingConnector(UnalignedConnector):
    """Its loads end a step after they began, or before the forward."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed: set[str] = set()
        self._bad: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        FAILURES.caches = self._caches

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if FAILURES.at_once:
            return CopyingConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if FAILURES.at_once:
            CopyingConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def start_load_kv(self, forward_context: Any, **how: Any) -> None:
        if (loads := self._get_connector_metadata().loads) and FAILURES.fail == "block":
            FAILURES.held.append(loads[BAD])
            self._bad.add(loads[BAD][0])
            self._copy(loads[:BAD] + loads[BAD + 1 :])
            STORE.clear()
            FAILURES.fail = ""
        for request, loads in self._arriving.items():
            if FAILURES.hold:
                FAILURES.held += loads
                FAILURES.waiting.add(request)
            elif FAILURES.fail == "request":
                FAILURES.held += loads
                self._failed.add(request)
            elif FAILURES.fail == "block":
                FAILURES.held.append(loads[BAD])
                self._bad.add(loads[BAD][0])
                self._copy(loads[:BAD] + loads[BAD + 1 :])
            else:
                self._copy(loads)
        self._arrived |= self._arriving.keys() - FAILURES.waiting
        if self._arriving and FAILURES.fail and FAILURES.forget:
            STORE.clear()
        if self._arriving:
            FAILURES.fail, FAILURES.hold = "", False
        self._arriving = self._get_connector_metadata().later

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed, self._failed = self._failed, set()
        _, arrived = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=set(arrived or ()), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad
