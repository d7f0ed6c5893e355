"""Records beside host slots on a GPU. The controller here has what SGLang 0.5.16's has of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from canary_kernels import layout
from canary_obs.engines.sglang import hierarchical_cache
from canary_obs.engines.sglang.hierarchical_cache import HierarchicalCache
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.vocabulary import HOST_PEER


class Observer:
    """Records are the slot's number in every word, until they cannot be had."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.protecting, self.faults = calls, True, list[str]()

    def records_of(self, group: str, slots: Tensor) -> Tensor | None:
        self.calls.append(f"records of {slots.tolist()}")
        return slots[:, None].repeat(1, layout.RECORD_WORDS) if self.protecting else None

    def before_load(self, group: str, slots: Tensor) -> None:
        self.calls.append(f"before {slots.tolist()}")

    def awaited(self, group: str, slots: Tensor) -> None:
        self.calls.append(f"await {slots.tolist()}")

    def received(self, group: str, slots: Tensor, records: Tensor | None = None, peer: str = "") -> None:
        assert group == "full"
        assert peer == ("" if records is None else HOST_PEER)
        sent = "nothing" if records is None else records[:, 0].tolist()
        self.calls.append(f"received {slots.tolist()} with {sent}")

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(f"{part}: {error}")


class Controller:
    """Copies that are queued start together."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.write_queue: list[Any] = []
        self.load_queue: list[Any] = []
        self.ack_load_queue: list[Any] = []
        self.mem_pool_host = SimpleNamespace(size=8, alloc=lambda slots: slots)

    def start_writing(self) -> None:
        self.calls.append("write")
        self.write_queue.clear()

    def start_loading(self) -> int:
        self.calls.append("load")
        self.load_queue.clear()
        self.ack_load_queue.append(SimpleNamespace(finish_event=self))
        return 7

    def wait(self) -> None:
        """Of the event of a load's end."""
        self.calls.append("wait for the load")


class Rig:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.observer, self.controller = Observer(self.calls), Controller(self.calls)
        self.patches = MethodPatches()
        given: Any = self.observer
        self.cache = HierarchicalCache(self.controller, given, self, torch.device("cpu"))
        self.cache.wrap(self.patches)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        self.calls.append("in order")
        yield
        self.calls.append("end")

    def precede(self) -> None:
        self.calls.append("precede")

    def write(self, *copies: tuple[list[int], list[int]]) -> list[str]:
        """Host slots and those of the device, of each copy."""
        self.controller.write_queue += [copy_of(*each) for each in copies]
        return self._run(self.controller.start_writing)

    def load(self, *copies: tuple[list[int], list[int]]) -> list[str]:
        self.controller.load_queue += [copy_of(*each) for each in copies]
        return self._run(self.controller.start_loading)

    def arrive(self) -> list[str]:
        return self._run(self.cache.arrive)

    def _run(self, act: Any) -> list[str]:
        self.calls.clear()
        act()
        return list(self.calls)


def copy_of(host: list[int], device: list[int]) -> Any:
    return SimpleNamespace(host_indices=torch.tensor(host), device_indices=torch.tensor(device))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    checked = list[Any]()
    monkeypatch.setattr(hierarchical_cache, "check_methods", lambda *given: checked.append(given))
    made = Rig()
    ((engine, methods),) = checked
    assert engine == "SGLang"
    assert [set(names) for names in methods.values()] == [{"start_writing", "start_loading"}]
    return made


def test_records_leave_after_the_checks_and_are_compared_when_the_bytes_are_back(rig: Rig) -> None:
    assert rig.write(([5, 1], [20, 30]), ([2], [40])) == [
        "write", "in order", "records of [20, 30, 40]", "end",
    ]  # fmt: skip
    assert rig.load(([1, 2], [50, 60]), ([5], [70])) == [
        "in order", "before [50, 60, 70]", "await [50, 60, 70]", "end", "precede", "load",
    ]  # fmt: skip
    assert rig.arrive() == ["wait for the load", "received [50, 60, 70] with [30, 40, 20]"]
    assert rig.arrive() == []
    assert (rig.cache.compared, rig.cache.without) == (3, 0)


def test_a_copy_without_a_record_gets_a_baseline(rig: Rig) -> None:
    rig.write(([0, 1], [20, 30]))
    rig.observer.protecting = False
    rig.write(([2], [40]))
    rig.controller.mem_pool_host.alloc(torch.tensor([1]))  # for something else, of which nothing was said
    rig.load(([0, 1, 2, 3], [50, 60, 70, 80]))
    assert rig.arrive() == [
        "wait for the load", "received [50] with [20]", "received [60, 70, 80] with nothing",
    ]  # fmt: skip
    rig.load(([3], [80]))
    assert rig.arrive() == ["wait for the load", "received [80] with nothing"]
    assert (rig.cache.compared, rig.cache.without) == (1, 4)


def test_a_host_pool_without_room(rig: Rig) -> None:
    rig.write(([0], [20]))
    assert rig.controller.mem_pool_host.alloc(None) is None
    rig.load(([0], [50]))
    assert rig.arrive()[1:] == ["received [50] with [20]"]
    assert rig.observer.faults == []


def test_loads_that_are_under_way_at_once(rig: Rig) -> None:
    rig.write(([0, 1], [20, 30]))
    rig.load(([0], [50]))
    rig.load(([1], [60]))
    assert rig.arrive() == [
        "wait for the load", "received [50] with [20]", "wait for the load", "received [60] with [30]",
    ]  # fmt: skip


def test_the_device_memory_that_it_takes_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hierarchical_cache, "check_methods", lambda *_: None)
    with caplog.at_level("INFO", "canary_obs"):
        Rig()
    assert caplog.messages == ["records of 8 host slots take 256 B of device memory"]


def test_nothing_to_copy(rig: Rig) -> None:
    assert (rig.write(), rig.load(), rig.arrive()) == (["write"], ["load"], [])


def test_the_number_of_the_load_is_the_engines(rig: Rig) -> None:
    rig.controller.load_queue.append(copy_of([0], [50]))
    assert rig.controller.start_loading() == 7


def test_a_fault_does_not_reach_the_engine(rig: Rig) -> None:
    rig.write(([9], [20]))  # a host slot that is none
    assert len(rig.observer.faults) == 1
    assert rig.load(([9], [50]))[-1] == "load"
    assert len(rig.observer.faults) == 2
    assert rig.observer.faults[1].startswith("host_tier: ")


def test_what_could_not_be_followed_is_awaited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots were emptied when they came free: by their records they were never written."""
    monkeypatch.setattr(rig.observer, "before_load", lambda *_: int("none"))
    assert rig.load(([0], [50])) == ["in order", "in order", "await [50]", "end", "load"]
    assert len(rig.observer.faults) == 1
    assert rig.arrive() == []


def test_nothing_is_left_of_it(rig: Rig) -> None:
    rig.patches.restore()
    assert rig.write(([0], [20])) == ["write"]
    assert not {"start_writing", "start_loading"} & vars(rig.controller).keys()
