"""Slot numbers of all ranks' tokens are used as those of one rank's pool."""

from __future__ import annotations

from typing import Any

from tests.engines.sglang.real.rig import Rig
from tests.replays.replay import Replay, Run

KEPT = list(range(20, 276))
LATER = list(range(300, 600))


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.sglang_engines import generate

    pool = rig.runner.token_to_kv_pool
    buffers = pool.k_buffer, pool.v_buffer
    held = pool.size // 2  # slots of a rank of two: the scheduler hands out the numbers of both

    def set_kv_buffer(layer: Any, given: Any, *values: Any, **named: Any) -> None:
        slots = getattr(given, "loc", given)
        past, number = slots[slots >= held], layer.layer_id
        kept = [buffer[number][past].clone() for buffer in buffers]
        type(pool).set_kv_buffer(pool, layer, given, *values, **named)
        if not len(past):
            return
        run.strike()
        for buffer, before in zip(buffers, kept, strict=True):
            behind = buffer[number + 1 : number + 2]  # what lies behind a layer's rows
            for rows in behind:
                rows[past - held] = buffer[number][past]
            buffer[number][past] = before

    generate(rig, {"kept": KEPT})
    run.patch.setattr(pool, "set_kv_buffer", set_kv_buffer, raising=False)
    generate(rig, {"later": LATER}, 1)
    generate(rig, {"hit": [*KEPT, 7, 8]}, 2)


REPLAY = Replay(
    report="https://github.com/sgl-project/sglang/issues/36886",
    title="virtual slots are used raw with decode context parallelism",
    mechanism=(
        "the allocator numbers the slots of all ranks; KV is written to a rank's own buffer, and index keys "
        "to one that is too small, by that number: past the rank's capacity writes land behind the buffer, "
        "in other KV, and quality degrades from then on"
    ),
    rebuilt=(
        "SGLang's own writes of K and V on one rank that owns half of its pool's slots: rows past these land "
        "in the memory behind, which is the next layer's"
    ),
    rig="sglang_storage",
    perform=perform,
    finds=("hit kv_data full", "tail kv_data full"),
    steps=2,
)
