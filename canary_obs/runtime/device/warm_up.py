"""Compiles every kernel before the first forward, on batches of padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from canary_kernels import layout
from canary_kernels.arrival import (
    EDGE_WORDS,
    ArrivedLoad,
    fold_records,
    judge_arrivals,
    keep_arrivals,
    weigh_arrivals,
)
from canary_kernels.buffers import GroupBuffers, RowBatch
from canary_kernels.checks import Backend
from canary_kernels.fingerprint import (
    baseline_range,
    baseline_slots,
    compare_range,
    compare_slots,
    complete_slots,
    hash_slots,
)
from canary_kernels.forward_start import start_forward
from canary_kernels.layer_write import check_layer, note_layer
from canary_kernels.verify import verify_list, verify_rows
from canary_kernels.write import reset_slots, write_identities
from canary_obs.engine_api.views import StepTypes
from canary_obs.runtime.device.state import DeviceState, Group

# (requests, tokens of each): one token, a decode batch, a prefill: they select the kernels' launch shapes.
_BATCHES = ((1, 1), (64, 1), (1, 8192))


@contextmanager
def expected_compilation() -> Iterator[None]:
    """Within it kernels are compiled unseen by Triton's hook for compilations.

    vLLM monitors compilations once its own warm-up is over, which is when a canary is attached: it would warn
    of each kernel, and refuse the first in its mode `error`. What is compiled later is monitored.
    """
    try:
        from triton import knobs
    except ImportError:  # no Triton: nothing is compiled
        yield
        return
    hook, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, None
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = hook


@expected_compilation()
def warm_up(state: DeviceState, types: StepTypes) -> None:
    """Run every operation of every group once per kernel shape; touches no record and no counter."""
    if state.backend is not Backend.TRITON:
        return
    for group in state.groups:
        buffers = _scratch(group)
        for requests, tokens in _BATCHES:
            batch = _padding(group, types, requests, tokens)
            write_identities(state.backend, buffers, batch)
            for phase in (layout.Phase.HEAD, layout.Phase.TAIL):
                verify_rows(state.backend, buffers, batch, phase)
            complete_slots(state.backend, buffers, group.plan, batch.out_slots)
            for _ in range(group.layers.num_layers):
                if (layer := group.layers.next_layer()) is not None:
                    given = layer, group.layers.witness, batch.out_slots
                    note_layer(state.backend, buffers, *given)
                    check_layer(state.backend, buffers, *given)
                    group.layers.noted_layer()
            compare_slots(
                state.backend, buffers, group.plan, batch.out_slots, layout.Phase.HEAD, of_forward=True
            )
            for phase in layout.Phase:
                compare_slots(state.backend, buffers, group.plan, batch.out_slots, phase)
            skipped = torch.full((requests * tokens,), -1, dtype=torch.int64, device=state.clock.device)
            reset_slots(state.backend, buffers, skipped, layout.RecordState.EMPTY)
            verify_list(state.backend, buffers, skipped, skipped, skipped, layout.Phase.SWEEP)
            compare_slots(state.backend, buffers, group.plan, skipped, layout.Phase.SWEEP)
            compare_slots(state.backend, buffers, group.plan, skipped, layout.Phase.PATROL)
            compare_slots(state.backend, buffers, group.plan, skipped, layout.Phase.HIT)
            baseline_slots(state.backend, buffers, group.plan, skipped)
        _warm_up_loads(group, buffers, state.clock.device)
        compare_range(state.backend, buffers, group.plan, range(0), layout.Phase.PATROL)
        baseline_range(state.backend, buffers, group.plan, range(0))
    start_forward(state.backend, state.clock, 0)
    if state.clock.is_cuda:
        torch.cuda.synchronize(state.clock.device)


def _warm_up_loads(group: Group, buffers: GroupBuffers, device: torch.device) -> None:
    """Of one block, into which nothing has arrived."""

    def nothing(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    load = ArrivedLoad(
        slots=nothing(1, 1) - 1,
        old=nothing(1, 1, layout.RECORD_WORDS),
        identities=nothing(1, 1, 2),
        now=hash_slots(group.backend, group.plan, nothing(1) - 1).view(1, 1, 2),
        edges=nothing(1, EDGE_WORDS),
        keys=nothing(1),
        held=nothing(2),
    )
    fold_records(group.backend, buffers, load.slots, load.keys)
    blocks = weigh_arrivals(group.backend, buffers, load)
    keep_arrivals(
        group.backend, buffers, load, judge_arrivals(group.backend, buffers, blocks, nothing(1, 1, 2))
    )


def _scratch(group: Group) -> GroupBuffers:
    real = group.buffers
    counters, log = torch.zeros_like(real.counters), torch.zeros_like(real.violations)
    return replace(real, counters=counters, violations=log)


def _padding(group: Group, types: StepTypes, requests: int, tokens: int) -> RowBatch:
    device, total = group.memory.device, requests * tokens

    def column(length: int, dtype: torch.dtype, value: int = 0) -> torch.Tensor:
        return torch.full((length,), value, dtype=dtype, device=device)

    return RowBatch(
        slot_table=column(requests, types.slot_table).view(requests, 1),
        page_size=group.view.page_size,
        rows=column(requests, types.rows, -1),
        starts=group.first_positions.compute(column(requests, types.lengths)),
        prefix_lens=column(requests, types.lengths),
        extend_lens=column(requests, types.lengths),
        token_starts=column(requests + 1, types.lengths),
        digests=column(requests, torch.int64) if types.has_digests else None,
        input_ids=column(total, types.input_ids),
        positions=column(total, types.positions),
        out_slots=column(total, types.out_slots, -1),
        expected_ids=None if types.expected_ids is None else column(total, types.expected_ids, -1),
        known_lens=column(requests, torch.int64, -1) if types.has_known_tokens else None,
        known_digests=column(requests, torch.int64) if types.has_known_tokens else None,
    )
