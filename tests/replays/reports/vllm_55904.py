"""Files that an engine with another KV layout stored are taken for one's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.replays.replay import Replay, Run


def exchange(tiers: Any, run: Run) -> None:
    """As if the files had been stored with tokens before heads."""
    heads, tokens, entry = tiers.rig.layer_cache(0, 0)[0].shape
    for file in tiers.files():
        data = np.frombuffer(file.read_bytes(), np.float32).reshape(-1, heads, tokens, entry)
        file.write_bytes(data.swapaxes(1, 2).tobytes())
    run.strike()


def perform(tiers: Any, run: Run) -> None:
    tiers.loaded(lambda _: exchange(tiers, run), memory=True)


REPLAY = Replay(
    report="https://github.com/vllm-project/vllm/issues/55904",
    title="files of another KV layout under the same key",
    mechanism=(
        "a folder of stored KV is told apart by model and parallelism, not by the layout of the KV cache: an "
        "engine that starts with another layout loads the files of the one before, whose sizes are the same"
    ),
    rebuilt="vLLM's file tier, whose files are rewritten with heads and tokens exchanged",
    rig="vllm_offload",
    perform=perform,
    finds=("head kv_data full",),
    listed=False,
)
