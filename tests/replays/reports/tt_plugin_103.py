"""A reused row of the block table keeps the last request's blocks behind its own, and they are written."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Replay, Run

LONG = prompts(1, shared=760, seed=24)[0][:760]  # 24 blocks
OTHER = prompts(1, shared=750, seed=25)[0][:750]  # prefilled in chunks


def perform(rig: Rig, run: Run) -> None:
    from vllm.v1.worker.block_table import BlockTable

    def clear_row(table: Any, row: int) -> None:
        table.num_blocks_per_row[row] = 0  # and its entries stay

    run.patch.setattr(BlockTable, "clear_row", clear_row)
    rig.start({"first": LONG}, 8)
    rig.step(5)
    rig.start({"victim": LONG}, 40)  # a prefix hit: the same blocks
    rig.step(4)
    rig.start({"moved": OTHER}, 4)
    while any(name.startswith("first") for name in rig.runner.requests):
        rig.step()
    table, row = rig.runner.input_batch.block_table[0], rig.row_of("moved")
    own, width = int(table.num_blocks_per_row[row]), -(-len(OTHER) // 32)
    tail = [int(block) for block in table.block_table.np[row, own:width] if block]
    assert set(tail) & set(rig.blocks_of("victim"))
    for layer in range(3):  # the plugin writes the chunk's padding through the whole width of the row
        cache = rig.layer_cache(0, layer)
        cache[tail] = torch.zeros_like(cache[tail])
    run.strike()
    rig.step(2)


REPLAY = Replay(
    report="https://github.com/tenstorrent/vllm-tt-plugin/pull/103",
    title="stale tail of a reused block-table row",
    mechanism=(
        "a request is moved into a row of the block table of which only its own entries are rewritten; the "
        "plugin uses the row's full width, so a prefill chunk writes into blocks of a live request"
    ),
    rebuilt=(
        "vLLM's own table, whose vacated rows are not cleared, as before that was mended; what the plugin's "
        "padded chunk writes through the row's tail is written"
    ),
    rig="vllm_loads",
    perform=perform,
    finds=("tail kv_data full",),
    steps=1,
)
