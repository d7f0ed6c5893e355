"""A layer's blocks are moved with the length of another layer's region."""

from __future__ import annotations

from typing import Any

from tests.replays.replay import Replay, Run


def fold(run: Run) -> None:
    """From now on the region of layer 2 has another one's block length."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    from tests.replays.vllm_engines import worker_connector

    real = gpu_worker.compute_sub_block_ptrs
    loaded = worker_connector().connector_worker.worker._load_handler.dst_tensors[2]

    def compute_sub_block_ptrs(blocks: Any, per_chunk: int, output: Any, tensor: Any, **named: Any) -> None:
        real(blocks, per_chunk, output, tensor, **named)
        if tensor is loaded:
            output[:] = tensor.data_ptr() + blocks.astype("uint64")[: len(output)] * (tensor.stride(0) // 2)
            run.strike()

    run.patch.setattr(gpu_worker, "compute_sub_block_ptrs", compute_sub_block_ptrs)


def perform(tiers: Any, run: Run) -> None:
    tiers.loaded(lambda _: fold(run))


REPLAY = Replay(
    report="https://github.com/vllm-project/vllm/issues/57661",
    title="regions with one base address and different block lengths",
    mechanism=(
        "transfer regions are told apart by base address alone; a layer that shares its base with another "
        "is moved with that one's block length, truncated and at the wrong offsets"
    ),
    rebuilt=(
        "the offload worker's own addresses of one layer, computed with half its block length when loading"
    ),
    rig="vllm_offload",
    perform=perform,
    finds=("head kv_data full",),
)
