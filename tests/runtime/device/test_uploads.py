"""Copies to a device whose progress the test controls; on a GPU: tests/gpu/test_loads.py."""

from __future__ import annotations

import threading

import pytest
import torch

from canary_obs.runtime.device.uploads import Staging, prepare_uploads, uploaded_lists
from tests.runtime.device.test_upload_ring import ManualEvent

CPU = torch.device("cpu")


def staging(size: int = 64) -> tuple[list[ManualEvent], Staging]:
    gates: list[ManualEvent] = []

    def event() -> ManualEvent:
        gates.append(ManualEvent())
        return gates[-1]

    return gates, Staging(size, CPU, event)


def numbers(*given: int) -> torch.Tensor:
    return torch.tensor(given, dtype=torch.int64)


def test_what_is_sent_stays_as_it_was() -> None:
    _, memory = staging()
    source = numbers(1, 2)
    found = memory.copy(source)
    source.zero_()
    second = memory.copy(torch.tensor([[3, 4]], dtype=torch.int32))
    assert found is not None
    assert second is not None
    assert found.tolist() == [1, 2]
    assert second.tolist() == [[3, 4]]
    assert second.dtype is torch.int32


def test_memory_is_not_written_to_before_its_copy_is_done() -> None:
    gates, memory = staging()
    for _ in range(4):
        assert memory.copy(numbers(1, 2)) is not None
    assert memory.copy(numbers(3)) is None
    gates[1].passed = True
    assert memory.copy(numbers(3)) is None  # the first one is under way
    gates[0].passed = True
    assert memory.copy(numbers(3, 4, 5)) is not None
    assert memory.copy(numbers(6)) is None
    assert [gate.recorded for gate in gates] == [1, 2, 1, 1]


def test_what_is_larger_than_the_memory_has_no_room() -> None:
    _, memory = staging()
    assert memory.copy(torch.zeros(9, dtype=torch.int64)) is None
    assert memory.copy(torch.zeros(8, dtype=torch.int64)) is not None


@pytest.mark.parametrize("inside", [True, False])
def test_memory_made_in_inference_mode_serves_outside_of_it(inside: bool) -> None:
    with torch.inference_mode(inside):
        _, memory = staging()
    with torch.inference_mode(not inside):
        assert memory.copy(numbers(1)) is not None


def test_each_thread_has_memory_of_its_own() -> None:
    found = [prepare_uploads(CPU)]
    thread = threading.Thread(target=lambda: found.append(prepare_uploads(CPU)))
    thread.start()
    thread.join()
    assert prepare_uploads(CPU) is found[0] is not found[1]


def test_lists_are_sent_together() -> None:
    lists = [[3, 1], [], [2], [5, 5, -1]]
    parts = uploaded_lists(lists, CPU)
    assert [part.tolist() for part in parts] == lists
    assert {part.dtype for part in parts} == {torch.int64}
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.is_contiguous() for part in parts)
