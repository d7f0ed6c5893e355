"""A prefix comes back from the host without one of its pools."""

from __future__ import annotations

from typing import Any

from tests.engines.sglang.real.rig import Rig
from tests.replays.replay import Replay, Run

KEPT = list(range(20, 276))


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.sglang_engines import push_out

    rig.generate({"kept": KEPT})
    push_out(rig)
    entries = rig.scheduler.tree_cache.cache_controller.mem_pool_host.entry_map.values()
    tier = rig.adapter.host_tier
    assert tier is not None
    entry = next(entry for entry in entries if tier._groups[id(entry.device_pool)] == "swa")

    def left_out(*_: Any, **__: Any) -> None:
        run.strike()

    for name in ("load_to_device_per_layer", "load_to_device_all_layer"):
        if hasattr(entry.host_pool, name):
            run.patch.setattr(entry.host_pool, name, left_out)
    rig.generate({"again": [*KEPT, 7, 8]})


REPLAY = Replay(
    report="https://github.com/sgl-project/sglang/issues/38031",
    title="host load-back without the index buffers",
    mechanism=(
        "HiCache restores the KV of a prefix and not the pool beside it by which attention selects what it "
        "reads (DSA's index keys); the restore is reported as a full hit"
    ),
    rebuilt=(
        "SGLang's own load-back, in which the window pool, beside the full one, is left out; its pools of "
        "index keys do not run on a CPU"
    ),
    rig="sglang_windows",
    perform=perform,
    finds=("head kv_data swa",),
)
