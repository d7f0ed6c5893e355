"""Two positions of one prefill are written to one slot of the window pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tests.engines.sglang.real.rig import Rig
from tests.replays.replay import Replay, Run

KEPT = list(range(20, 276))
LATER = [*KEPT, *range(600, 640)]  # 40 tokens behind what comes back from the host


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.sglang_engines import push_out

    rig.generate({"kept": KEPT})
    push_out(rig)
    allocator = rig.runner.token_to_kv_pool_allocator
    slots = allocator.full_to_swa_index_mapping
    taken: list[tuple[int, int]] = []

    def set_full_to_swa_mapping(full: Any, window: Any) -> None:
        type(allocator).set_full_to_swa_mapping(allocator, full, window)
        if len(full) == len(LATER) - len(KEPT):
            taken.append((int(full[-1]), int(slots[full[-1]])))
            slots[full[-1]] = slots[full[0]]
            run.strike()

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request("later", LATER, 8)]
        while not taken:
            yield ()
        yield ()
        ((full, window),) = taken
        slots[full] = window  # so that it is freed once, and SGLang does not stop over it
        while "later" not in rig.finished:
            yield ()

    run.patch.setattr(allocator, "set_full_to_swa_mapping", set_full_to_swa_mapping)
    rig.run(script())


REPLAY = Replay(
    report="https://github.com/sgl-project/sglang/issues/33656",
    title="a window slot with another position",
    mechanism=(
        "with HiCache, SGLang's own canary finds a slot of DeepSeek-V4's window pool with another position "
        "than expected right after a forward (512, 8448); the report does not name the cause; NaN follows"
    ),
    rebuilt=(
        "SGLang's own map from slots to window slots gives the last token of a prefill, behind a prefix that "
        "came back from the host, the window slot of the first"
    ),
    rig="sglang_windows",
    perform=perform,
    finds=("tail chain swa", "tail position swa"),
    steps=1,
)
