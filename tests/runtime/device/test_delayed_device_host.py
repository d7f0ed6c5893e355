"""Copies from a device whose progress the test controls."""

from __future__ import annotations

import torch

from canary_obs.runtime.device.delayed_device_host import DelayedDeviceHost


class SlowDevice:
    """Makes events that are done when the test says so."""

    def __init__(self) -> None:
        self.now = 0
        self.lag = 0
        self.queries = 0

    def event(self) -> SlowEvent:
        return SlowEvent(self)


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device, self.ready_at = device, 0

    def record(self) -> None:
        self.ready_at = self.device.now + self.device.lag

    def query(self) -> bool:
        self.device.queries += 1
        return self.device.now >= self.ready_at


def make(rows: int = 4, lag: int = 0) -> tuple[SlowDevice, torch.Tensor, DelayedDeviceHost]:
    device = SlowDevice()
    device.lag = lag
    source = torch.full((3,), -7, dtype=torch.int64)
    return device, source, DelayedDeviceHost(source, rows, device.event)


def test_a_copy_shows_the_source_as_of_its_push() -> None:
    device, source, host = make(lag=2)
    source.fill_(1)
    assert host.push(10, 100.0)
    source.fill_(2)
    assert host.poll() == []
    device.now = 2
    (sample,) = host.poll()
    assert (sample.sequence, sample.step, sample.pushed) == (0, 10, 100.0)
    assert sample.values.tolist() == [1, 1, 1]


def test_copies_arrive_in_order_and_rows_are_reused() -> None:
    device, source, host = make(rows=2, lag=1)
    seen = []
    for step in range(20):
        source.fill_(step)
        assert host.push(step, float(step))
        device.now += 1
        seen += [(sample.step, sample.values[0].item()) for sample in host.poll()]
    assert seen == [(step, step) for step in range(20)]
    assert host.skipped == 0


def test_newest_drops_the_copies_before_it() -> None:
    device, source, ring = make(rows=4, lag=2)
    assert ring.newest() is None
    for step in range(4):
        source.fill_(step)
        ring.push(step, 0.0)
        device.now += 1
    found = ring.newest()
    assert found is not None
    assert (found.sequence, found.step, found.values.unique().tolist()) == (2, 2, [2])
    assert ring.lag(4, 0.0)[0] == 2
    assert [ring.push(step, 0.0) for step in range(4, 8)] == [True, True, True, False]  # one is under way
    device.now += 2
    assert [sample.sequence for sample in ring.poll()] == [3, 4, 5, 6]


def test_when_all_have_arrived_the_newest_frees_every_row() -> None:
    device, source, ring = make(rows=4, lag=2)
    for step in range(4):
        source.fill_(step)
        ring.push(step, 0.0)
    device.now += 2
    found = ring.newest()
    assert found is not None
    assert (found.sequence, found.step, found.values.unique().tolist()) == (3, 3, [3])
    assert not ring.busy
    assert [ring.push(step, 0.0) for step in range(4, 9)] == [True, True, True, True, False]


def test_a_sample_does_not_change_when_its_row_is_reused() -> None:
    _, source, host = make(rows=1)
    source.fill_(5)
    host.push(0, 0.0)
    (sample,) = host.poll()
    source.fill_(6)
    host.push(1, 1.0)
    host.poll()
    assert sample.values.tolist() == [5, 5, 5]


def test_a_full_ring_skips_and_counts_and_recovers() -> None:
    device, _, host = make(rows=3, lag=100)
    pushed = [host.push(step, float(step)) for step in range(10)]
    assert pushed == [True] * 3 + [False] * 7
    assert host.skipped == 7
    assert host.lag(9, 9.0) == (10, 9.0)
    device.now = 200
    assert [sample.step for sample in host.poll()] == [0, 1, 2]
    assert host.push(10, 10.0)
    assert host.next_sequence == 4


def test_lag_is_zero_when_nothing_is_in_flight() -> None:
    device, _, host = make(lag=1)
    assert host.lag(5, 1.0) == (0, 0.0)
    host.push(5, 1.0)
    assert host.lag(7, 3.5) == (3, 2.5)
    device.now = 1
    host.poll()
    assert host.lag(7, 3.5) == (0, 0.0)


def test_poll_queries_a_late_copy_once() -> None:
    device, _, host = make(rows=8, lag=50)
    for step in range(8):
        host.push(step, 0.0)
    device.queries = 0
    host.poll()
    assert device.queries == 1


def test_flush_gives_up_at_its_timeout_and_keeps_what_arrived() -> None:
    device, _, host = make(rows=2, lag=0)
    host.push(0, 0.0)
    device.lag = 10**9
    host.push(1, 0.0)
    assert [sample.step for sample in host.flush(0.01)] == [0]
    assert host.busy
