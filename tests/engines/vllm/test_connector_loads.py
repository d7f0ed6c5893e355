"""From the announcement of a load to its arrival; with a real connector: real/test_connectors.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.vllm.cached_blocks import Loaded
from canary_obs.engines.vllm.connector_loads import ConnectorLoads

SIZE = 4


def group(name: str, number: int) -> Any:
    return SimpleNamespace(view=SimpleNamespace(name=name), number=number, block_size=SIZE)


class Recorder:
    """The hooks that loads call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, list[int]]] = []

    def __getattr__(self, hook: str) -> Any:
        return lambda name, slots: self.calls.append((hook, name, slots.tolist()))

    def take(self) -> list[tuple[str, str, list[int]]]:
        calls, self.calls = self.calls, []
        return calls


def output(new: dict[str, int] | None = None, cached: dict[str, int] | None = None, ended: str = "") -> Any:
    """A scheduler output; values are tokens computed before."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
        finished_req_ids=set(ended),
        preempted_req_ids=None,
    )


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def loads() -> ConnectorLoads:
    return ConnectorLoads([group("full", 0)], torch.device("cpu"))


FIRST, LAST = (
    Loaded(0, 7, 0, 0, 4, "a"),
    Loaded(0, 9, 1, 0, 3, "a"),
)  # seven tokens, the match ends in a block


def test_whole_blocks_are_awaited(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(), (FIRST, LAST), recorder)
    assert recorder.take() == [("awaited", "full", [28, 29, 30, 31, 36, 37, 38, 39])]
    loads.end_step(recorder)
    assert recorder.take() == []
    loads.begin_step(output(), (Loaded(0, 7, 0, 2, 3, "b"),), recorder)
    assert recorder.take() == [("awaited", "full", [28, 29, 30, 31])]


def test_a_load_of_the_forward_arrives_with_its_step(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(new={"a": 7}), (FIRST, LAST), recorder)
    assert [hook for hook, _, _ in recorder.take()] == ["awaited"]
    loads.end_step(recorder)
    assert recorder.take() == [("received", "full", [28, 29, 30, 31, 36, 37, 38])]
    loads.end_step(recorder)
    assert recorder.take() == []


def test_what_the_forward_writes_gets_no_baseline(loads: ConnectorLoads, recorder: Recorder) -> None:
    # All seven were loaded; the last one is computed again.
    loads.begin_step(output(cached={"a": 6}), (FIRST, LAST), recorder)
    loads.end_step(recorder)
    assert recorder.take()[-1] == ("received", "full", [28, 29, 30, 31, 36, 37])


def test_a_load_that_failed_is_computed_and_gets_no_baseline(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    loads.begin_step(output(), (FIRST, LAST), recorder)
    recorder.take()
    loads.begin_step(output(new={"a": 0}), (), recorder)
    assert recorder.take() in ([], [("received", "full", [])])


def test_a_waiting_request_gets_no_baseline_before_it_is_scheduled(
    loads: ConnectorLoads, recorder: Recorder
) -> None:
    loads.begin_step(output(), (FIRST,), recorder)
    recorder.take()
    loads.begin_step(output(new={"b": 0}), (), recorder)
    loads.end_step(recorder)
    assert recorder.take() == []
    loads.begin_step(output(new={"a": 4}), (), recorder)
    assert recorder.take() == [("received", "full", [28, 29, 30, 31])]
    loads.begin_step(output(cached={"a": 5}), (), recorder)
    assert recorder.take() == []


def test_a_request_that_ended_is_forgotten(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(), (FIRST,), recorder)
    loads.begin_step(output(ended="a"), (), recorder)
    recorder.take()
    loads.begin_step(output(new={"a": 4}), (), recorder)
    assert recorder.take() == []


def test_a_step_that_failed_reports_no_arrival(loads: ConnectorLoads, recorder: Recorder) -> None:
    loads.begin_step(output(new={"a": 4}), (FIRST,), recorder)
    recorder.take()
    loads.begin_step(output(), (), recorder)
    loads.end_step(recorder)
    assert recorder.take() == []


def test_other_groups_lose_what_a_load_overwrites(recorder: Recorder) -> None:
    loads = ConnectorLoads([group("full", 0), group("swa", 1)], torch.device("cpu"))
    loads.begin_step(output(new={"a": 4}), (Loaded(1, 2, 0, 0, 4, "a"),), recorder)
    assert recorder.take() == [("invalidated", "full", [8, 9, 10, 11]), ("awaited", "swa", [8, 9, 10, 11])]
    loads.end_step(recorder)
    assert recorder.take() == [("received", "swa", [8, 9, 10, 11])]
