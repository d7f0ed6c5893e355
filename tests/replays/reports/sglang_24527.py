"""Blocks are freed while a receive into them is under way: it lands in another request's KV."""

from __future__ import annotations

from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Replay, Run

PROMPT = prompts(1, shared=330, seed=23)[0][:330]


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.vllm_engines import receive_under_way

    scheduler, land = rig.core.scheduler, receive_under_way(rig, run, "aborted", PROMPT)
    for name in list(scheduler.requests):
        scheduler.finished_recving_kv_req_ids.add(name)  # vLLM would keep the blocks until the receive ends
    rig.llm.llm_engine.abort_request(["aborted"])
    rig.step(1)
    rig.start({str(seed): prompts(1, seed=seed, shared=300)[0] for seed in range(30, 34)})
    rig.step(6)
    run.strike()
    land()
    rig.step(2)


REPLAY = Replay(
    report="https://github.com/sgl-project/sglang/issues/24527",
    title="decode reuses pages before the transfer's writer has finished",
    mechanism=(
        "a request is aborted during its transfer; its pages go back to the free list, the next request "
        "gets them, and the transfer, which nobody stopped, overwrites them"
    ),
    rebuilt=(
        "vLLM's scheduler takes the receive of an aborted request for finished and frees its blocks; the "
        "connector's copy lands when others decode in them"
    ),
    rig="vllm_loads",
    perform=perform,
    finds=("tail kv_data full",),
    steps=1,
    listed=False,
)
