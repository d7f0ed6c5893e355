"""What waits for what on the early stream, by its calls; on a GPU: tests/gpu/test_early_stream.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.early_stream import EarlyStream
from canary_obs.engines.toolkit.forward_stream import ForwardStream

GPU = torch.device("cuda", 0)


class Device:
    """Streams and events that write down what is done with them; streams are numbered in turn."""

    def __init__(self, patch: pytest.MonkeyPatch, pool: list[int]) -> None:
        self.calls: list[str] = []
        self.pool, self.events = iter(pool), 0
        patch.setattr(torch, "Stream", lambda _: Stream(self, next(self.pool)))
        patch.setattr(torch, "Event", lambda _: Event(self))

    def remembered(self, number: int) -> ForwardStream:
        """A stream of the engine."""
        found = ForwardStream(GPU)
        found._stream, found.unknown = Stream(self, number), False
        return found


class Stream:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.stream_id = device, number

    def wait_event(self, event: Event) -> None:
        self.device.calls.append(f"{self.stream_id} waits {event.number}")

    def __enter__(self) -> None:
        self.device.calls.append(f"enter {self.stream_id}")

    def __exit__(self, *raised: object) -> None:
        self.device.calls.append(f"leave {self.stream_id}")


class Event:
    def __init__(self, device: Device) -> None:
        device.events += 1
        self.device, self.number = device, f"e{device.events}"

    def record(self, stream: Any = None) -> None:
        self.device.calls.append(f"{self.number} on {'it' if stream is None else stream.stream_id}")

    def wait(self, stream: Any = None) -> None:
        self.device.calls.append(f"{'it' if stream is None else stream.stream_id} waits {self.number}")


def called(device: Device) -> list[str]:
    found = device.calls[:]
    device.calls.clear()
    return found


def test_it_waits_for_the_scheduler_and_the_checks_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, [7])
    early = EarlyStream(GPU, device.remembered(1))
    early.checked()
    early.checked()
    first, last = (call.split()[0] for call in called(device))
    assert first != last
    with early:
        device.calls.append("work")
    scheduled, *rest = called(device)
    event = scheduled.split()[0]
    assert scheduled == f"{event} on 1"
    assert rest[:4] == [f"7 waits {event}", f"7 waits {first}", "enter 7", "work"]
    done = rest[4].split()[0]
    assert rest[4:] == [f"{done} on it", "leave 7"]
    early.join()
    assert called(device) == [f"it waits {done}"]
    early.checked()
    with early:
        pass
    assert f"7 waits {last}" in called(device)


def test_the_scheduler_waits_for_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, [7])
    EarlyStream(GPU, device.remembered(1)).kept()
    event = device.calls[0].split()[0]
    assert called(device) == [f"{event} on it", f"1 waits {event}"]


def test_it_is_none_of_the_engines_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are not known before the first forward."""
    device = Device(monkeypatch, [2, 1, 3, 5, 9])
    early = EarlyStream(GPU, device.remembered(1), [device.remembered(2), device.remembered(3)])
    for _ in range(2):
        with early:
            assert "enter 5" in called(device)
    assert next(device.pool) == 9


def test_on_a_cpu_it_does_nothing() -> None:
    cpu = torch.device("cpu")
    early = EarlyStream(cpu, ForwardStream(cpu))
    with early:
        early.checked()
        early.kept()
    early.join()
    assert early.stream_id is None
