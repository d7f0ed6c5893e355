"""A connector that does not know the packed layout moves half of each token's entry."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Replay, Run

PROMPT = prompts(1, shared=230, seed=22)[0][:230]


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.vllm_engines import lost_from_device, worker_connector

    lost_from_device(rig, PROMPT)
    connector = worker_connector()

    def copy(loads: list[tuple[int, list[Any]]]) -> None:
        for block, kept in loads:
            for cache, entry in zip(connector._caches, kept, strict=True):
                heads = entry.shape[0]  # [heads, block size, 2 * head size]: a head's K, then its V
                cache[block].view(heads, 2, -1)[:, 0] = entry.view(heads, 2, -1)[:, 0]
            run.strike()

    run.patch.setattr(connector, "_copy", copy, raising=False)
    rig.generate([PROMPT], 8)


REPLAY = Replay(
    report="https://github.com/LMCache/LMCache/issues/4463",
    title="packed KV layout misread by the in-process connector",
    mechanism=(
        "K and V share the last dimension of vLLM's packed layout; the connector takes them for two tensors "
        "and moves the wrong half-sized rows, without an error"
    ),
    rebuilt=(
        "a connector that takes the first half of each head's entry for the whole of it: V is not restored"
    ),
    rig="vllm_loads",
    perform=perform,
    finds=("head lost_load full",),
)
