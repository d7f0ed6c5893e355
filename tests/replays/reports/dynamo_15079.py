"""A transfer to the device fails, its status is dropped, and the job counts as done."""

from __future__ import annotations

from typing import Any

from tests.replays.replay import Replay, Run


def drop_status(run: Run) -> None:
    """From now on transfers to the device fail, and are counted like others."""
    from vllm.v1.kv_offload.base import TransferResult

    from tests.replays.vllm_engines import worker_connector

    worker = worker_connector().connector_worker.worker
    load, get_finished = worker._load_handler, worker.get_finished
    failed: list[int] = []

    def swap_blocks_batch(*_: Any, **__: Any) -> None:
        raise OSError("the file could not be registered")

    def submit_load(job: int, source: Any, target: Any) -> bool:
        try:
            return bool(load.transfer_async(job, source, target))
        except OSError:
            failed.append(job)
            run.strike()
            return True

    def get_all_finished() -> list[Any]:
        counted = [TransferResult(job_id=job, success=True) for job in failed]
        failed.clear()
        return [*get_finished(), *counted]

    run.patch.setattr(load, "_swap_blocks_batch", swap_blocks_batch)
    run.patch.setattr(worker, "submit_load", submit_load)
    run.patch.setattr(worker, "get_finished", get_all_finished)


def perform(tiers: Any, run: Run) -> None:
    tiers.loaded(lambda _: drop_status(run), memory=True)


REPLAY = Replay(
    report="https://github.com/ai-dynamo/dynamo/issues/15079",
    title="failed loads from disk are served",
    mechanism=(
        "a transfer from disk to the device fails as the file cannot be registered; the error is dropped, a "
        "counter goes up, the blocks count as loaded, and the request reads whose KV lay there"
    ),
    rebuilt=(
        "vLLM's own offload worker, whose copies to the device fail and whose jobs are counted as done; the "
        "files and the memory tier are sound"
    ),
    rig="vllm_offload",
    perform=perform,
    finds=("head lost_load full",),
)
