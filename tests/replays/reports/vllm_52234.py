"""A receive that failed is reported as complete, and the request decodes what lay in its blocks."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real.rig import Rig, prompts
from tests.replays.replay import Replay, Run

PROMPT = prompts(1, shared=230, seed=21)[0][:230]


def perform(rig: Rig, run: Run) -> None:
    from tests.replays.vllm_engines import lost_from_device, worker_connector

    lost_from_device(rig, PROMPT)

    def copy(_: list[Any]) -> None:
        run.strike()  # the transfer has failed; `get_finished` reports it like any other

    run.patch.setattr(worker_connector(), "_copy", copy, raising=False)
    rig.generate([PROMPT], 8)


REPLAY = Replay(
    report="https://github.com/vllm-project/vllm/issues/52234",
    title="failed NIXL receives return HTTP 200 with wrong tokens",
    mechanism=(
        "with several cache groups a failed receive is not reported as failed: the request is taken for "
        "complete, and decodes whatever its blocks held"
    ),
    rebuilt="an asynchronous connector whose transfer fails reports the request in finished_recving alone",
    rig="vllm_loads",
    perform=perform,
    finds=("head lost_load full",),
)
