"""A KV connector whose loads fail as a test says: wholly, in one block, or with copies that come late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.engines.vllm.real.copying_connector import STORE, UnalignedConnector

Copy = tuple[int, list[Any]]  # block, and its bytes layer by layer


@dataclass
class Failures:
    """What happens to the next loads; `held`: copies that were not made."""

    fail: str = ""  # "request" or "block"; empty = nothing fails
    forget: bool = False  # what failed is not there any more when it is asked for again
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
    """Its loads end a step after they began."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed: set[str] = set()
        self._bad: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        FAILURES.caches = self._caches

    def start_load_kv(self, forward_context: Any, **how: Any) -> None:
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
