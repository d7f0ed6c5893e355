"""Blocks are freed while a receive into them is under way: it lands in another request's KV."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Replay, Run

PROMPT = prompts(1, shared=330, seed=23)[0][:330]


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.vllm_engines import lost_from_device, worker_connector

    lost_from_device(rig, PROMPT)
    connector, scheduler = worker_connector(), rig.core.scheduler
    in_flight: list[Any] = []
    run.patch.setattr(connector, "_copy", in_flight.extend, raising=False)
    run.patch.setattr(connector, "get_finished", lambda *_: (None, None), raising=False)
    rig.start({"aborted": PROMPT})
    rig.step(3)
    assert in_flight
    connector._arrived.clear()
    for name in list(scheduler.requests):
        scheduler.finished_recving_kv_req_ids.add(name)  # vLLM would keep the blocks until the receive ends
    rig.llm.llm_engine.abort_request(["aborted"])
    rig.step(1)
    rig.start({str(seed): prompts(1, seed=seed, shared=300)[0] for seed in range(30, 34)})
    rig.step(6)
    run.strike()
    type(connector)._copy(connector, in_flight)
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
