"""In steps that are taken for steady, a real vLLM brings nothing that would have been followed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.engines.vllm.real.rig import prompts


class Silent:
    """An observer that nobody may call."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called in a steady step")


def followed(adapter: Any) -> Any:
    """What the adapter knows of its engine's requests and blocks."""
    cached = adapter.cached_blocks
    return copy.deepcopy((
        adapter.requests._prompts, adapter.requests._lengths, adapter.prefix_hits(),
        {name: list(adapter.request_blocks(group.number)) for name, group in adapter._by_name.items()},
        {name: cached.live_blocks(name) for name in adapter._by_name},
    ))  # fmt: skip


def test_nothing_would_have_been_followed(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that share prefixes, more than the pool holds at once, and one that is aborted."""
    rig = make_rig()
    adapter, steps = rig.adapter, {True: 0, False: 0}
    holds, grows, grown = adapter._steady.holds, adapter._steady.grows, []

    def checked(output: Any, events: Any) -> bool:
        found = holds(output, events)
        steps[found] += 1
        if found:
            before = followed(adapter)
            adapter.update_requests(output)
            adapter._block_changes.report(output, events, Silent())
            adapter.requests.report(output, {}, Silent())
            adapter._scales.follow(events, Silent())
            assert followed(adapter) == before
        return bool(found)

    def checked_blocks(output: Any, events: Any) -> bool:
        found = grows(output, events)
        if found:
            before = followed(adapter)
            adapter._block_changes.report(output, events, Silent())
            assert followed(adapter) == before
            grown.append(output)
        return bool(found)

    monkeypatch.setattr(adapter._steady, "holds", checked)
    monkeypatch.setattr(adapter._steady, "grows", checked_blocks)
    rig.generate(prompts(6, seed=1, shared=100), 24)
    rig.start({"a": prompts(1, seed=2)[0], "b": prompts(1, seed=3)[0]}, 60)
    rig.step(8)
    rig.llm.llm_engine.abort_request(["a"])
    rig.step(8)
    rig.finish()
    rig.generate(prompts(6, seed=1, shared=100), 12)
    assert rig.settle() == []
    assert rig.canary.health.faults.total() == 0
    assert steps[True] > 40
    assert steps[False] > 10
    assert len(grown) > 5
