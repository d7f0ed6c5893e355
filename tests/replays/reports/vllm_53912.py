"""The state that a request goes on with is copied from the wrong place."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real.rig import Rig
from tests.replays.replay import Replay, Run


def perform(rig: Rig, run: Run) -> None:
    from vllm.v1.worker import mamba_utils

    collect = mamba_utils.collect_mamba_copy_meta

    def collect_mamba_copy_meta(bufs: Any, config: Any, funcs: Any, groups: Any, source: int, target: int,
                                bias: int, request: Any, context: Any) -> None:  # fmt: skip
        # The count of accepted tokens is read from the row that another request has by now.
        run.strike()
        collect(bufs, config, funcs, groups, source, target, bias + 1, request, context)

    run.patch.setattr(mamba_utils, "collect_mamba_copy_meta", collect_mamba_copy_meta)
    rig.start({"grows": list(range(10, 135))}, 12)  # its 128th token fills the first block of states
    rig.finish()


REPLAY = Replay(
    report="https://github.com/vllm-project/vllm/issues/53912",
    title="prefix caching with drafts corrupts Mamba states",
    mechanism=(
        "counts of accepted tokens are gathered from rows that have moved, so the state for the next block, "
        "and for the prefix cache, is copied from the wrong offset"
    ),
    rebuilt=(
        "vLLM's own copy of a state at a block's end is given a count that is one too high, without drafts"
    ),
    rig="vllm_states",
    perform=perform,
    finds=("head kv_data state", "hit kv_data state"),
    steps=1,
)
