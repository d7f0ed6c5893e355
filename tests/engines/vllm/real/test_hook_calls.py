"""What the hooks cost the host of a decode step, in calls: their number, unlike its time, is no host's."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.engines.vllm.real.hook_calls import HOOKS, HookCalls, as_on_a_gpu, steps_counted
from tests.engines.vllm.real.rig import keep_asynchronous

# Of Python and of C, by hook, for any number of requests: what a step has cost when it was last made cheaper.
STEADY = {
    "V1Adapter": {"scheduler": 25, "adapter": 50, "head": 21, "tail": 8, "between": 3, "around": 22},
    "V2Adapter": {"scheduler": 25, "adapter": 38, "head": 24, "tail": 8, "between": 3, "around": 26},
}
BLOCK = 32


@pytest.fixture
def rig(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_asynchronous(monkeypatch.setattr)
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "async_scheduling": True}
    made = make_rig(canary={"write_history": "0"}, block_size=BLOCK, **given)
    as_on_a_gpu(made, monkeypatch)
    return made


def calls_of(found: list[HookCalls]) -> dict[str, float]:
    """The median of steps, by hook."""
    assert len(found) > 8
    return {hook: median(calls.total[hook] for calls in found) for hook in HOOKS}


@pytest.mark.parametrize("requests", [1, 16])
def test_a_steady_step(rig: Any, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    """No request is given a block: the calls are as many for any number of them."""
    before = rig.canary.checks.replays.replayed
    calls = calls_of(steps_counted(rig, [BLOCK + 1] * requests, monkeypatch)[False])
    bounds = STEADY[type(rig.adapter).__name__]
    assert {hook: calls[hook] for hook in HOOKS if calls[hook] > bounds.get(hook, 0)} == {}
    assert rig.canary.checks.replays.replayed >= before + 40, "heads and tails are one launch each"
    assert not rig.canary.health.faults


def test_a_prompt_that_displaces_as_many_blocks_as_it_takes(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is wherever a pool has been in use for long: each of its blocks costs some calls."""
    keep_asynchronous(monkeypatch.setattr)
    given = {"max_num_batched_tokens": 4096, "async_scheduling": True, "num_gpu_blocks_override": 80}
    rig = make_rig(canary={"write_history": "0"}, block_size=BLOCK, **given)
    as_on_a_gpu(rig, monkeypatch)
    found = []
    for number in range(7):
        rig.start({f"{number}": [4 + (number * at + at) % 90 for at in range(31 * BLOCK)]}, 2)
        calls = HookCalls()
        with calls.counting():
            rig.step()
        found.append(calls.total)
        rig.step(5)
    filled = found[4:]  # the pool is full since the third, and one in four applies events
    before = "scheduler", "adapter", "around"  # the model's forward, and what precedes it in `head`
    assert max(sum(calls[hook] for hook in before) for calls in filled) < 31 * 16
    assert max(calls["around"] for calls in filled) < 31 * 11
    assert max(sum(calls.values()) for calls in filled) < 31 * 34
    assert not rig.canary.health.faults
