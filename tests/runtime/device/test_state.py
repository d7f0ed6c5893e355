"""Batches of a group are cached by the identity of their tensors."""

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st

from canary_kernels.layout import CHAIN_ANCHOR, COUNT_WRITTEN, MAX_POSITION, RecordState, signed
from canary_kernels.write import write_identities
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.views import GroupStep, GroupView, StepView
from canary_obs.runtime.device.state import DeviceState

CPU = torch.device("cpu")


def state_of(window: int | None, backend: str = "torch") -> DeviceState:
    view = GroupView(name="full", num_slots=64, page_size=1, sources=(), window=window)
    return DeviceState([view], CPU, CanaryConfig(backend=backend))


def shown(count: int) -> StepView:
    """Requests that add one token each to an empty prefix."""
    return StepView(
        request_ids=[str(number) for number in range(count)],
        rows=torch.arange(count),
        prefix_lens=torch.zeros(count, dtype=torch.int64),
        extend_lens=torch.ones(count, dtype=torch.int64),
        token_starts=torch.arange(count + 1),
        input_ids=torch.arange(count),
        positions=torch.zeros(count, dtype=torch.int64),
        digests=torch.full((count,), signed(CHAIN_ANCHOR)),
        groups={
            "full": GroupStep(slot_table=torch.arange(64).view(8, 8), out_slots=torch.arange(count) * 8),
        },
    )


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_the_same_tensors_give_the_same_batch(backend):
    state = state_of(None, backend)
    (group,), view = state.groups, shown(3)
    batch = group.batch(view)
    write_identities(state.backend, group.buffers, batch)
    view.prefix_lens.add_(1)
    view.positions.add_(1)
    view.groups["full"].out_slots.add_(1)
    again = group.batch(dataclasses.replace(view, request_ids=["a", "b", "c"]))
    assert again is batch
    write_identities(state.backend, group.buffers, again)
    assert group.buffers.counters[COUNT_WRITTEN] == 6
    written = group.buffers.records[:, 0].nonzero().flatten().tolist()
    assert written == [0, 1, 8, 9, 16, 17]
    positions = [int(group.buffers.records[slot, 0]) >> 35 & MAX_POSITION for slot in written]
    assert positions == [0, 1] * 3


@pytest.mark.parametrize("changed", ["rows", "prefix_lens", "digests", "input_ids", "positions"])
def test_another_tensor_gives_another_batch(changed):
    (group,), view = state_of(None).groups, shown(3)
    batch = group.batch(view)
    other = dataclasses.replace(view, **{changed: getattr(view, changed).clone()})
    assert group.batch(other) is not batch
    assert getattr(group.batch(other), changed) is getattr(other, changed)
    assert group.batch(dataclasses.replace(view, digests=None)).digests is None


def test_first_positions_follow_the_prefix_of_a_window():
    (group,), view = state_of(4).groups, shown(3)
    batch = group.batch(view)
    assert batch.starts.tolist() == [0, 0, 0]
    view.prefix_lens.copy_(torch.tensor([2, 5, 9]))
    assert group.batch(view) is batch
    assert group.first_positions.compute(view.prefix_lens) is batch.starts
    assert batch.starts.tolist() == [0, 2, 6]
    other = group.batch(shown(2))
    assert group.first_positions.compute(other.prefix_lens).tolist() == other.starts.tolist() == [0, 0]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_slots_whose_bytes_another_group_has_are_emptied_as_all_become_unknown(backend):
    views = [
        GroupView(name=name, num_slots=6, page_size=1, sources=(), window=None) for name in ("full", "swa")
    ]
    others = {"full": torch.tensor([1, 4]), "swa": None}
    state = DeviceState(views, CPU, CanaryConfig(backend=backend), foreign_slots=others.__getitem__)
    state.adopt_all()
    found = [
        [RecordState(int(word) >> 32 & 7) for word in group.buffers.records[:, 0]] for group in state.groups
    ]
    adopted, empty = RecordState.ADOPTED, RecordState.EMPTY
    assert found == [[adopted, empty, adopted, adopted, empty, adopted], [adopted] * 6]


@given(slots=st.lists(st.integers(-70, 140) | st.just(-(1 << 63)) | st.just((1 << 63) - 1), max_size=8))
def test_records_of_numbers_that_are_no_slots_are_neither_read_nor_written(slots):
    (group,) = state_of(None).groups
    group.memory[:64, 1] = torch.arange(64)
    before, numbers = group.buffers.records.clone(), torch.tensor(slots, dtype=torch.int64)
    chains = group.records_of(numbers)[:, 1].tolist()
    assert chains == [slot if 0 <= slot < 64 else 0 for slot in slots]
    group.copy(torch.full_like(numbers, -1), numbers)
    kept = [slot for slot in range(64) if slot not in slots]
    assert torch.equal(group.buffers.records[kept], before[kept])
    assert not group.buffers.records[[slot for slot in slots if 0 <= slot < 64], 1].any()
