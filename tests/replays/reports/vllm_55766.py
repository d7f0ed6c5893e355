"""The state that a prefix is cached with is overwritten by the tokens behind it."""

from __future__ import annotations

from tests.engines.vllm.real.rig import Rig
from tests.replays.replay import Replay, Run

BOUNDARY = 128  # tokens of a block of states
PROMPT = list(range(10, 10 + BOUNDARY + 6))  # ends a few tokens past it


def perform(rig: Rig, run: Run) -> None:
    rig.start({"first": PROMPT}, 2)
    rig.step(2)  # a chunk up to the boundary, and one behind it
    checkpoint, running = rig.blocks_of("first", 1)[:2]
    context = rig.runner.compilation_config.static_forward_context
    for name in rig.runner.kv_cache_config.kv_cache_groups[1].layer_names:
        for states in context[name].kv_cache:
            states[checkpoint] = states[running]
    run.strike()
    rig.finish()
    rig.generate([[*PROMPT[:BOUNDARY], 7, 8, 9]], 2)


REPLAY = Replay(
    report="https://github.com/vllm-project/vllm/issues/55766",
    title="NaN after a prefix hit in a model with states",
    mechanism=(
        "a prompt ends 4 to 10 tokens past a block's boundary; the state that was kept at the boundary is "
        "bad, and a later request that joins there gets NaN from its first step; the report does not name "
        "the cause (n-gram drafts were on)"
    ),
    rebuilt=(
        "the state at the boundary, which the prefix cache of vLLM holds, gets the bytes of the running "
        "state that the rest of the prompt left, without drafts"
    ),
    rig="vllm_states",
    perform=perform,
    finds=("head kv_data state", "hit kv_data state"),
    steps=2,
)
