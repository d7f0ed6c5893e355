"""Blocks are handed to others while a store still reads them, and the tier keeps what came after."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real.rig import prompts
from tests.replays.replay import Replay, Run

PROMPT = list(range(300, 530))


def perform(tiers: Any, run: Run) -> None:
    from tests.replays.vllm_engines import worker_connector

    rig = tiers.rig
    tiers.forget(memory=True)
    stores = worker_connector().connector_worker.worker._store_handler
    copy, late = stores._swap_blocks_batch, []

    def swap_blocks_batch(*store: Any, **more: Any) -> None:
        late.append(([part.clone() for part in store], more))  # read when a thread gets to it

    stores._swap_blocks_batch = swap_blocks_batch
    rig.generate([PROMPT], 2)
    rig.generate(prompts(1, seed=77, shared=0), 2)
    stores._swap_blocks_batch = copy
    assert late
    assert rig.llm.reset_prefix_cache()
    rig.generate(prompts(8, seed=6, groups=8), 2)
    for store, more in late:
        copy(*store, **more)
    tiers.settle()
    assert rig.llm.reset_prefix_cache()
    rig.settle()
    rig.found.clear()
    run.strike()
    rig.generate([PROMPT], 2)


REPLAY = Replay(
    report="https://github.com/vllm-project/vllm/issues/52360",
    title="preemption frees blocks that store jobs are reading",
    mechanism=(
        "a store reads its blocks on a thread of its own, later; preemption frees them in between and others "
        "overwrite them, so that the tier keeps KV that is not its key's and serves it as a prefix hit"
    ),
    rebuilt=(
        "vLLM's own stores to memory, whose copies are made when the blocks have new owners; they were freed "
        "by a reset of the prefix cache"
    ),
    rig="vllm_offload",
    perform=perform,
    finds=("head kv_data full",),
    listed=False,
)
