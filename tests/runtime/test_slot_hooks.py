"""What the runtime makes of slots and requests that change outside of its own hooks around a forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.runtime.run_state import RunState
from canary_obs.runtime.slot_hooks import SlotHooks


@pytest.mark.parametrize(("said", "followed"), [(None, 9), (8, 8), (0, 0)])
def test_requests_changed_after_the_forward_that_they_are_shown_with(said: int | None, followed: int) -> None:
    """One that is shown late holds its blocks from the forward on that came first."""
    run, steps = RunState(), []
    run.armed, run.step = True, 9
    taint: Any = SimpleNamespace(follow=lambda shown, step: steps.append(step), _identity=None)
    faults: Any = SimpleNamespace(guard=lambda part, act, *given: act(*given) or True)
    hooks = object.__new__(SlotHooks)
    hooks.taint, hooks._hook_run, hooks._hook_faults = taint, run, faults
    hooks.requests_changed(ChangedRequests(step=said))
    assert steps == [followed]
