"""What an adapter does between the calls of a runner, without a vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.adapter import VllmAdapter


@pytest.mark.parametrize("due", ["nothing", "requests", "blocks", "loads"])
def test_what_follows_a_forward_is_on_the_adapters_clock(due: str) -> None:
    """It was on none: a bench that reads the clocks saw less than the engine's thread had to do."""
    done: list[str] = []
    loads = SimpleNamespace(landing={"a": ()} if due == "loads" else {}, failed=set())
    own: Any = SimpleNamespace(
        requests=SimpleNamespace(due=due == "requests", settle=lambda: done.append("requests")),
        cached_blocks=SimpleNamespace(due=due == "blocks", catch_up=lambda: done.append("blocks")),
        _block_changes=SimpleNamespace(written=[], loads=loads, end_step=lambda _: done.append("loads")),
    )
    observer: Any = SimpleNamespace(overhead={"adapter": 0.0})
    VllmAdapter.end_step(own, observer)
    assert (due in done) == (due != "nothing")
    assert (observer.overhead["adapter"] > 0.0) == (due != "nothing")
