"""A step of a real vLLM that lasts: the service sees it by the link's own thread, and pages nobody."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import State
from tests.engines.vllm.real.rig import Rig, prompts
from tests.unchecked import Report

SECONDS = 8.0  # far more than the 5 s after which a silent rank is blind


class Service:
    """A hub behind a real socket, and every state that it had."""

    def __init__(self, endpoint: str) -> None:
        self.hub = Hub(ServiceConfig(endpoint=endpoint))
        self.listener = ZmqListener(endpoint, self.hub)

    def wait(self, state: State, seconds: float = 30.0) -> float:
        began = time.monotonic()
        while self.hub.verdict()[0] is not state:
            assert time.monotonic() - began < seconds, self.hub.verdict()
            threading.Event().wait(0.01)
        return time.monotonic() - began


@pytest.fixture
def service(tmp_path: Any) -> Any:
    found = Service(f"ipc://{tmp_path}/s")
    yield found
    found.listener.close()


@pytest.mark.slow
def test_a_step_of_eight_seconds_changes_no_state(
    make_rig: Any, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = service.hub.config.endpoint
    rig: Rig = make_rig(canary={"endpoint": endpoint, "snapshot_seconds": "0.1"})
    rig.generate(prompts(2), 4)
    service.wait(State.OK)
    release, inside = threading.Event(), threading.Event()
    forward = rig.runner._model_forward

    def waiting(*given: Any, **named: Any) -> Any:
        inside.set()
        assert release.wait(120.0)
        return forward(*given, **named)

    monkeypatch.setattr(rig.runner, "_model_forward", waiting)
    thread = threading.Thread(target=rig.generate, args=(prompts(1, seed=3), 1))
    thread.start()
    states: set[State] = set()
    longest = 0.0
    try:
        assert inside.wait(60.0)
        deadline = time.monotonic() + 60.0
        while longest < SECONDS:
            assert time.monotonic() < deadline, service.hub.verdict()
            states.add(service.hub.verdict()[0])
            longest = max(longest, service.hub.ranks()[0].step_seconds or 0.0)
            threading.Event().wait(0.02)
        assert states == {State.OK}
        assert service.hub.ranks()[0].snapshot_age > 5.0
    finally:
        release.set()
        thread.join()
        monkeypatch.undo()
    rig.generate(prompts(2, seed=4), 4)
    deadline = time.monotonic() + 5.0
    while service.hub.ranks()[0].step_seconds is not None:  # until the first snapshot after it
        assert time.monotonic() < deadline
        assert service.hub.verdict()[0] is State.OK
        threading.Event().wait(0.01)
    assert service.hub.verdict() == (State.OK, ())


def test_a_forward_that_is_never_closed(make_rig: Any, unchecked: Report) -> None:
    rig: Rig = make_rig()
    rig.generate(prompts(2), 4)
    rig.settle()
    assert rig.canary.verdict() == (State.OK, ())
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.canary, "after_forward", lambda view: None)
        rig.start({"a": prompts(1, seed=7)[0]}, 3)
        rig.step()
    verdict = rig.canary.verdict()
    unchecked(
        "a forward is never closed", "vLLM V1", verdict,
        names="the observer failed: unclosed_forward", seconds=time.monotonic() - began,
    )  # fmt: skip
    rig.finish()
    assert rig.canary._depth == 0
    assert rig.settle() == []
