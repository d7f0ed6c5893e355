"""A store that failed stays visible, and what is read under its key is not what was stored."""

from __future__ import annotations

from typing import Any

from tests.replays.replay import Replay, Run


def perform(tiers: Any, run: Run) -> None:
    from vllm.v1.kv_offload.tiering.fs import manager

    def batch_store_block(paths: list[str], view: memoryview, offsets: Any, size: int, *_: Any) -> None:
        import os
        from pathlib import Path

        for path in paths:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                os.truncate(file.fileno(), size)  # room was reserved, and the write failed: only a warning

    run.patch.setattr(manager, "batch_store_block", batch_store_block)
    tiers.loaded(lambda _: run.strike(), memory=True)


REPLAY = Replay(
    report="https://github.com/LMCache/LMCache/issues/4991",
    title="failed stores stay visible to lookups",
    mechanism=(
        "a store to the file tier fails with a warning, its key stays visible, and a later load under it "
        "returns whatever is there"
    ),
    rebuilt="vLLM's file tier with a write that reserves the file, fails, and is taken for done",
    rig="vllm_offload",
    perform=perform,
    finds=("head kv_data full",),
)
