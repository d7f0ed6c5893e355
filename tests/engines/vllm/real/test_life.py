"""Mode raise, sleep, wake-up and detach: how the canary follows a worker's life cycle."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.engines.toolkit.engine_methods import find_class
from canary_obs.engines.vllm import plugin, versions, worker
from canary_obs.errors import KVCacheViolation
from canary_obs.vocabulary import Reason, State
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.server import wait_until


def exchange_rows(rig: Rig) -> None:
    table = rig.runner.input_batch.block_table[0].block_table.np
    table[[0, 1]] = table[[1, 0]]


def test_raise_ends_the_engine_with_the_evidence(make_rig: Any) -> None:
    rig = make_rig(canary={"mode": "raise"})
    assert len(rig.generate(prompts(4), 4)) == 4
    asked = prompts(2, groups=2, seed=3)
    rig.start({"a": asked[0], "b": asked[1]})
    rig.step(4)
    exchange_rows(rig)
    with pytest.raises(KVCacheViolation, match="reason=token, phase=head, group=full") as caught:
        rig.step(2)
    exchange_rows(rig)
    named = {violation.request[:1] for violation in caught.value.violations if violation.request}
    assert named == {"a", "b"}


def test_raise_with_a_draft_ends_the_engine_where_tokens_are_sampled(make_rig: Any, models: Any) -> None:
    speculation = {"method": "eagle", "model": str(models("llama_eagle")), "num_speculative_tokens": 3}
    rig = make_rig(
        canary={"mode": "raise"}, speculative_config=speculation, max_model_len=512, async_scheduling=False
    )
    rig.generate(prompts(4), 4)
    with rig.adapter.hooks.lock:
        rig.draft_cache()[rig.idle_blocks()[0]].zero_()
        rig.canary.patrol.whole_cycle()
    rig.start({"a": prompts(1, seed=3)[0]})
    with pytest.raises(KVCacheViolation, match="reason=kv_data, phase=patrol, group=draft"):
        rig.step(3)
    assert not rig.adapter.hooks.lock.locked()


def test_the_next_step_raises_what_was_found_while_idle(make_rig: Any) -> None:
    rig = make_rig(canary={"mode": "raise"})
    rig.generate(prompts(4), 4)
    block = rig.idle_blocks()[0]
    with rig.adapter.hooks.lock:
        rig.layer_cache(0, 1)[block].zero_()
        rig.canary.patrol.whole_cycle()
    idle = rig.adapter.hooks.idle_thread
    assert idle is not None
    wait_until(lambda: idle.raised)
    rig.start({"a": prompts(1, seed=3)[0]})
    with pytest.raises(KVCacheViolation, match="reason=kv_data") as caught:
        rig.step()
    assert {violation.slot // 32 for violation in caught.value.violations} == {block}


def test_detached_while_asleep_and_back_after(make_rig: Any) -> None:
    rig = make_rig()
    first = rig.generate(prompts(6), 8)
    rig.llm.sleep(level=1)
    assert worker.runtime_of(rig.worker) is None
    assert "execute_model" not in vars(rig.runner)
    rig.llm.wake_up()
    rig.collect_from()
    assert rig.generate(prompts(6), 8) == first
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.canary.sweeper.last.total > 0


@pytest.fixture
def unregistered() -> Iterator[None]:
    """vLLM loads its plugins once per process, so the plugin is registered again afterwards."""
    plugin.unregister()
    yield
    plugin.unregister()
    plugin.register()


@pytest.mark.usefixtures("unregistered")
def test_detaching_leaves_every_object_as_it_was(make_rig: Any) -> None:
    owners = [(find_class(path, name), name) for path, names in versions.HOOKS.items() for name in names]

    def found() -> list[Any]:
        return [vars(owner)[name] for owner, name in owners]

    before = found()
    plugin.register()
    kept = [name for (_, name), now, then in zip(owners, found(), before, strict=True) if now is then]
    assert kept == ["get_block_ids"]  # only called
    rig = make_rig()
    answers = rig.generate(prompts(3), 6)
    canary = rig.canary
    worker.detach_from_worker(rig.worker)
    plain = dict(vars(rig.runner))
    worker.attach_to_worker(rig.worker)
    assert set(vars(rig.runner)) - set(plain) == {"execute_model", "_model_forward", "_dummy_run"}
    worker.detach_from_worker(rig.worker)
    assert vars(rig.runner).keys() == plain.keys()
    assert all(map(operator.is_, vars(rig.runner).values(), plain.values()))
    plugin.unregister()
    assert all(map(operator.is_, found(), before))
    steps = canary.step
    assert rig.generate(prompts(3), 6) == answers
    assert canary.step == steps


@pytest.mark.parametrize("handled", [True, False])
def test_zeroed_blocks(make_rig: Any, monkeypatch: pytest.MonkeyPatch, handled: bool) -> None:
    """vLLM zeroes blocks that it hands out anew: their records end with their bytes."""
    rig = make_rig()
    rig.generate(prompts(4), 4)
    block = rig.idle_blocks()[-1]  # the one that is handed out last
    if not handled:
        monkeypatch.setattr(rig.canary, "invalidated", lambda *_: None)
    # vLLM's own does this in Triton.
    monkeypatch.setattr(rig.runner, "_zero_block_ids", lambda ids: rig.layer_cache(0, 0)[ids[0]].zero_())
    schedule = rig.core.scheduler.schedule

    def with_zeroed(*given: Any) -> Any:
        output = schedule(*given)
        output.new_block_ids_to_zero = [block]
        output.kv_canary_block_events = (*output.kv_canary_block_events, block)
        rig.core.scheduler.schedule = schedule
        return output

    rig.core.scheduler.schedule = with_zeroed
    rig.generate([list(range(50, 80))], 2)
    assert (rig.settle() == []) is handled
    if not handled:
        assert {violation.reason for violation in rig.found} == {Reason.KV_DATA}
