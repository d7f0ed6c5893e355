"""Uploads to a device whose progress the test controls."""

from __future__ import annotations

import torch

from canary_obs.runtime.device.upload_ring import UploadRing


class ManualEvent:
    """An event that is done when the test says so."""

    def __init__(self) -> None:
        self.recorded, self.passed = 0, True

    def record(self) -> None:
        self.recorded += 1
        self.passed = False

    def query(self) -> bool:
        return self.passed


def make(rows: int) -> tuple[list[ManualEvent], UploadRing]:
    gates: list[ManualEvent] = []

    def event() -> ManualEvent:
        gates.append(ManualEvent())
        return gates[-1]

    return gates, UploadRing(12, rows, torch.device("cpu"), event)


def test_columns_arrive_unchanged_when_their_source_changes() -> None:
    _, ring = make(2)
    first, second = torch.tensor([1, 2, 3]), torch.tensor([4, 5])
    to_device = ring.put(first, second)
    first.zero_()
    second.zero_()
    assert [column.tolist() for column in to_device] == [[1, 2, 3], [4, 5]]


def test_a_row_is_not_reused_before_its_copy_is_done() -> None:
    gates, ring = make(2)
    ring.put(torch.tensor([1]))
    assert ring.ready
    ring.put(torch.tensor([2]))
    assert not ring.ready
    gates[1].passed = True
    assert not ring.ready
    gates[0].passed = True
    assert ring.ready
    ring.put(torch.tensor([3]))
    assert [gate.recorded for gate in gates] == [2, 1]


def test_on_the_cpu_nothing_is_copied() -> None:
    ring = UploadRing(12, 2, torch.device("cpu"))
    column = torch.tensor([7, 8])
    assert ring.ready
    assert ring.put(column)[0] is column
