"""In steps that are taken for steady, a real vLLM brings nothing that would have been followed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from canary_obs.engines.vllm.steady_step import Change
from canary_obs.runtime.device import replays
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.tokens import swap_samples


class Silent:
    """An observer that nobody may call."""

    compares_hits = True

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called in a steady step")


def followed(adapter: Any) -> Any:
    """What the adapter knows of its engine's requests and blocks."""
    cached = adapter.cached_blocks
    return copy.deepcopy((
        adapter.requests._prompts, adapter.requests._lengths, adapter.prefix_hits(),
        {name: list(adapter.request_blocks(group.number)) for name, group in adapter._by_name.items()},
        {name: cached.live_blocks(name).tolist() for name in adapter._by_name},
    ))  # fmt: skip


def test_nothing_would_have_been_followed(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that share prefixes, more than the pool holds at once, and one that is aborted."""
    rig = make_rig()
    adapter, steps = rig.adapter, dict.fromkeys(Change, 0)
    asked = adapter._steady.change

    def checked(output: Any, events: Any) -> Change:
        found: Change = asked(output, events)
        steps[found] += 1
        if found is not Change.OTHER:
            adapter.show_requests()
            before = followed(adapter)
            if found is Change.NOTHING:
                adapter.update_requests(output)
            adapter._block_changes.report(output, events, Silent())
            if found is Change.NOTHING:
                adapter.requests.report(output, {}, Silent())
                adapter._scales.follow(events, Silent())
            assert followed(adapter) == before
        return found

    monkeypatch.setattr(adapter._steady, "change", checked)
    rig.generate(prompts(6, seed=1, shared=100), 24)
    rig.start({"a": prompts(1, seed=2)[0], "b": prompts(1, seed=3)[0]}, 60)
    rig.step(8)
    rig.llm.llm_engine.abort_request(["a"])
    rig.step(8)
    rig.finish()
    rig.generate(prompts(6, seed=1, shared=100), 12)
    assert rig.settle() == []
    assert rig.canary.health.faults.total() == 0
    assert steps[Change.NOTHING] > 40
    assert steps[Change.GROWTH] > 5
    assert steps[Change.OTHER] > 5


def records_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, growth: bool) -> tuple[list[Any], int]:
    """Slots whose records were ended in a pool that is full, and steps in which requests only grew."""
    adapter, canary, ended, steps = rig.adapter, rig.canary, list[Any](), list[Change]()
    asked, ends = adapter._steady.change, canary.invalidated

    def change(*given: Any) -> Change:
        steps.append(asked(*given))
        return Change.OTHER if steps[-1] is Change.GROWTH and not growth else steps[-1]

    def invalidated(name: str, slots: torch.Tensor) -> None:
        ended.append((len(steps), name, slots.tolist()))
        ends(name, slots)

    monkeypatch.setattr(adapter._steady, "change", change)
    monkeypatch.setattr(canary, "invalidated", invalidated)
    rig.fresh()
    for seed in range(3):
        rig.generate(prompts(6, seed=seed, shared=100), 50)
    assert rig.settle() == []
    return ended, steps.count(Change.GROWTH)


def test_growth_ends_the_records_of_other_groups(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows next to full attention: the blocks that one group gets, others have had."""
    settings = {"num_gpu_blocks_override": 90, "max_num_seqs": 6}
    grown, steps = records_ended(make_rig("gemma3", **settings), monkeypatch, growth=True)
    followed_whole, _ = records_ended(make_rig("gemma3", **settings), monkeypatch, growth=False)
    assert grown == followed_whole
    assert steps > 5
    assert len(grown) > 20


def recorded(rig: Rig, request: str) -> list[Any]:
    """The records of a request's slots, in its order."""
    (group,) = rig.canary.state.groups
    size = rig.adapter.vllm_groups[0].block_size
    slots = [block * size + place for block in rig.blocks_of(request) for place in range(size)]
    records: list[Any] = group.memory[slots].tolist()
    return records


def run_of(rig: Rig, *, replaying: bool) -> tuple[Any, int]:
    """Records of two requests that decode, what is found once their samples are exchanged, and replays."""
    checks = rig.canary.checks
    checks.replays = replays.Replays(torch.device("cpu")) if replaying else None
    rig.fresh()
    rig.start({"a": prompts(1, seed=7)[0], "b": prompts(1, seed=8)[0]}, 40)
    rig.step(24)
    records, began = [recorded(rig, request) for request in "ab"], rig.canary.step
    assert rig.settle() == []
    while not swap_samples(rig):
        rig.step()
    rig.step(6)
    found = {(one.phase, one.reason, one.position, one.step - began, one.slots) for one in rig.settle()}
    rig.finish()
    return (records, found), 0 if checks.replays is None else checks.replays.replayed


def test_replays_change_nothing(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded and found is the same where forwards are launched one by one."""
    monkeypatch.setattr(replays, "REPEATS", 3)
    monkeypatch.setattr(replays, "FORWARDS_WAITED", 0)
    rig = make_rig()
    (replayed, count), (launched, _) = run_of(rig, replaying=True), run_of(rig, replaying=False)
    assert replayed == launched
    assert {reason.value for _, reason, *_ in replayed[1]} >= {"write_token"}
    assert count > 30  # heads and tails
    assert not rig.canary.health.faults
