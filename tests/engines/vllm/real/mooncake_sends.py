"""The sending side of Mooncake in a prefill engine, and faults of it: where the bytes are read, and when.

Its workers may be processes of their own: what is done in each goes by a call of vLLM's executor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

FAR = -7  # blocks: there lies the KV of the prompt before
_FAULTS = "kv_canary_tests_faults"  # of the connector's worker


class MooncakeSends:
    """Serves the lines of `prefill`: what was prefilled is ready to be fetched when it answers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._of_ranks(add_faults)

    def serve(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Prefill what was asked for; {"prompt": []} lets a send go on that was held up."""
        if not asked["prompt"]:
            self._of_ranks(let_go)
            return {}
        engine, core = self._engine, self._engine.core
        rank = asked.get("rank", 0)
        self._of_ranks(begin, asked.get("send", ""), rank, asked.get("expire", False))
        engine.prefill(asked["prompt"], {"transfer_id": asked["transfer"]})
        ((_, (blocks, *_)),) = core.scheduler.connector.connector_scheduler._reqs_need_send.values()
        if asked.get("flip"):
            engine.flip(blocks[1], rank)
        core.step_fn()  # hands the blocks over
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": asked["transfer"],
            "remote_engine_id": core.scheduler.connector.engine_id, "blocks": list(blocks),
            "remote_bootstrap_addr": f"http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
        }  # fmt: skip

    def _of_ranks(self, function: Callable[..., None], *args: Any) -> None:
        self._engine.core.model_executor.collective_rpc(function, args=args)


# In the workers ------------------------------------------------------------------------------------


def add_faults(_: Any) -> None:
    """Let sends of this worker go wrong."""
    worker = _connector_worker()
    setattr(worker, _FAULTS, _Faults(worker))


def begin(worker: Any, fault: str, rank: int, expire: bool) -> None:
    """Of what one rank sends from now on."""
    getattr(_connector_worker(), _FAULTS).begin(fault if worker.rank == rank else "", expire)


def let_go(_: Any) -> None:
    """A send that was held up."""
    getattr(_connector_worker(), _FAULTS).go.set()


def _connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker


class _Faults:
    def __init__(self, worker: Any) -> None:
        self._worker, self._fault, self.go = worker, "", threading.Event()
        self._send: Callable[..., int] = worker._send_blocks
        worker._send_blocks = self._faulty
        self._expired: set[str] = set()

    def begin(self, fault: str, expire: bool) -> None:
        worker, self._fault = self._worker, fault
        self.go.clear()
        worker.finished_sending_reqs -= self._expired
        if expire:  # vLLM frees nothing that is still to be sent: a time-out that does
            waiting = {each.p_req_id for each in worker.reqs_need_send.values()} - self._expired
            worker.finished_sending_reqs |= waiting
            self._expired |= waiting

    def _faulty(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        worker = self._worker
        if self._fault == "skip":
            return 0
        if self._fault == "late":
            assert self.go.wait(60)
        if self._fault in ("order", "layer", "block"):
            size, blocks = worker.block_len_per_layer[0], worker.kv_cache_config.num_blocks
            cut = [
                (source + at, target + at, min(size, length))
                for source, target, length in zip(sources, targets, lengths, strict=True)
                for at in range(0, length, size)
            ]
            sources, targets, lengths = ([each[part] for each in cut] for part in range(3))
            if self._fault == "order":
                sources[:2] = sources[1::-1]
            else:
                for start in worker.kv_caches_base_addr[-1 if self._fault == "layer" else 0 :]:
                    sources = [_elsewhere(source, start, size, blocks) for source in sources]
        return self._send(session, sources, targets, lengths)


def _elsewhere(source: int, start: int, size: int, blocks: int) -> int:
    """Another block of the region that starts there, if the address is in it."""
    block, offset = divmod(source - start, size)
    return start + (block + FAR) % blocks * size + offset if 0 <= block < blocks else source
