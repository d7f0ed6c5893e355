"""Blocks move while a transfer into them is under way: it lands where they were."""

from __future__ import annotations

from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Replay, Run

PROMPT = prompts(1, shared=330, seed=27)[0][:330]


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.vllm_engines import receive_under_way

    scheduler, land = rig.core.scheduler, receive_under_way(rig, run, "receiving", PROMPT)
    (name,) = scheduler.requests
    _move(rig, name, 1)
    rig.start({str(seed): prompts(1, seed=seed, shared=300)[0] for seed in range(70, 73)})
    rig.step(6)
    run.strike()
    land()
    rig.step(2)
    scheduler.finished_recving_kv_req_ids.add(name)
    rig.llm.llm_engine.abort_request(["receiving"])


def _move(rig: Rig, request: str, number: int) -> None:
    """Give a request's block another place, with its bytes; the old one is the next that is handed out."""
    manager = rig.core.scheduler.kv_cache_manager
    pool, own = manager.block_pool, manager.coordinator.single_type_managers[0].req_to_blocks[request]
    old, own[number] = own[number], pool.get_new_blocks(1)[0]
    for layer in range(3):
        cache = rig.layer_cache(0, layer)
        cache[own[number].block_id] = cache[old.block_id]
    pool.free_blocks([old])
    pool.free_block_queue.remove(old)
    pool.free_block_queue.prepend_n([old])


REPLAY = Replay(
    report="https://github.com/sgl-project/sglang/issues/39982",
    title="compaction moves pages while a transfer's gate is closed",
    mechanism=(
        "compaction of the unified memory pool moves pages although a disaggregated transfer still uses "
        "their places, and loses track of places that are still to be given back; they are used too early"
    ),
    rebuilt=(
        "a block of a request whose receive is under way is moved in vLLM's scheduler, with its bytes, and "
        "its old place is given to another request; the connector's copy lands there"
    ),
    rig="vllm_loads",
    perform=perform,
    finds=("tail kv_data full",),
    steps=1,
)
