"""The sending side of Mooncake in a prefill engine, and faults of it: where the bytes are read, and when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

FAR = -7  # blocks: there lies the KV of the prompt before


class MooncakeSends:
    """Serves the lines of `prefill`: what was prefilled is ready to be fetched when it answers."""

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._engine = engine
        self._worker = get_kv_transfer_group().connector_worker
        self._fault, self._go = "", threading.Event()
        self._send: Callable[..., int] = self._worker._send_blocks
        self._worker._send_blocks = self._faulty
        self._expired: set[str] = set()

    def serve(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Prefill what was asked for; {"prompt": []} lets a send go on that was held up."""
        if not asked["prompt"]:
            self._go.set()
            return {}
        self._fault = asked.get("send", "")
        self._go.clear()
        engine, core, worker = self._engine, self._engine.core, self._worker
        worker.finished_sending_reqs -= self._expired
        if asked.get("expire"):  # vLLM frees nothing that is still to be sent: a time-out that does
            waiting = {each.p_req_id for each in worker.reqs_need_send.values()} - self._expired
            worker.finished_sending_reqs |= waiting
            self._expired |= waiting
        engine.prefill(asked["prompt"], {"transfer_id": asked["transfer"]})
        ((_, (blocks,)),) = core.scheduler.connector.connector_scheduler._reqs_need_send.values()
        if asked.get("flip"):
            engine.flip(blocks[1])
        core.step_fn()  # hands the blocks over
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": asked["transfer"],
            "remote_engine_id": worker.engine_id, "blocks": list(blocks),
            "remote_bootstrap_addr": f"http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
        }  # fmt: skip

    def _faulty(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        worker = self._worker
        if self._fault == "skip":
            return 0
        if self._fault == "late":
            assert self._go.wait(60)
        if self._fault in ("order", "layer", "block"):
            size, blocks = worker.block_len_per_layer[0], worker.kv_cache_config.num_blocks
            cut = [
                (source + at, target + at)
                for source, target, length in zip(sources, targets, lengths, strict=True)
                for at in range(0, length, size)
            ]
            sources, targets = [source for source, _ in cut], [target for _, target in cut]
            lengths = [size] * len(cut)
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
