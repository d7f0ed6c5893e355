"""What vLLM counts itself, compared with what the canary was shown: V1, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE
from canary_obs.vocabulary import State
from tests.engines.vllm.real import hidden, prefix_hits, stale, walks
from tests.engines.vllm.real.forwards import NOT_SHOWN, acknowledge, tried
from tests.engines.vllm.real.rig import LATENT, Rig, prompts
from tests.engines.vllm.real.test_tables import check_tables, report_tables
from tests.unchecked import Report


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    made = Rig(models("llama"))
    yield made
    made.close()


def report_forwards(engine: str, found: dict[str, dict[str, Any]], unchecked: Report) -> None:
    for way, seen in found.items():
        assert seen["accused"] == [], way
        verdict = (seen["state"], seen["reasons"])
        unchecked(way, engine, verdict, names=NOT_SHOWN, seconds=seen["seconds"])


def test_forwards_that_are_not_shown(rig: Rig, unchecked: Report) -> None:
    found = tried(rig)
    assert len(found) == 3
    report_forwards("vLLM V1", found, unchecked)


def test_the_scheduler_numbers_outputs_that_came_past_the_worker(rig: Rig) -> None:
    rig.fresh()
    execute_model = rig.worker.execute_model
    rig.generate(prompts(2), 3)
    numbers = vars(rig.core.scheduler)[FORWARDS_ATTRIBUTE]
    vars(rig.worker).pop("execute_model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.adapter.hooks, "begin_forward", lambda build: None)
        rig.generate(prompts(2, seed=1), 3)
    lost = vars(rig.core.scheduler)[FORWARDS_ATTRIBUTE] - numbers
    rig.worker.execute_model = execute_model
    rig.generate(prompts(2, seed=2), 3)
    assert rig.canary.verdict()[0] is State.BLIND
    assert f"{NOT_SHOWN}: full {lost}" in rig.canary.verdict()[1]
    assert rig.settle() == []
    rig.canary.forwards.acknowledge()


def test_a_runner_that_waits_for_another_stage_is_not_idle(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker counts a forward, then waits for the stage before it, and only then calls its runner."""
    rig.fresh()
    acknowledge(rig)
    account = rig.canary.forwards
    before = dict(account.checked), dict(account.counted)
    polled, idle_thread = threading.Semaphore(0), rig.adapter.hooks.idle_thread
    begin, busy = rig.runner.execute_model, idle_thread._busy

    def poll() -> bool:
        polled.release()
        return busy()

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        for _ in range(5):
            assert polled.acquire(timeout=10.0)
        return begin(*args, **kwargs)

    monkeypatch.setattr(idle_thread, "_busy", poll)
    monkeypatch.setattr(rig.runner, "execute_model", execute_model)
    rig.generate(prompts(1), 3)
    state, reasons = rig.canary.verdict()
    assert state is State.OK, reasons
    assert account.checked["full"] - before[0]["full"] == account.counted["full"] - before[1]["full"] == 3


def test_counts_agree_in_clean_traffic(rig: Rig) -> None:
    rig.fresh()
    acknowledge(rig)  # of the test before, whose slots were adopted within the last ten seconds
    rig.generate(prompts(6), 8)
    rig.settle()
    account = rig.canary.forwards
    assert account.counted is not None
    assert account._ended == account._begun == account.counted
    assert rig.canary.verdict() == (State.OK, ())


def report_walks(engine: str, found: dict[str, dict[str, Any]], unchecked: Report) -> None:
    for way, seen in found.items():
        verdict = (seen["state"], seen["reasons"])
        unchecked(way, engine, verdict, names=seen["names"], seconds=seen["seconds"])


def test_walks_that_leave_blocks_out(rig: Rig, unchecked: Report) -> None:
    found = walks.tried(rig)
    assert len(found) == 4
    report_walks("vLLM V1", found, unchecked)


def test_a_damaged_block_is_seen_in_the_step_that_hits_it(rig: Rig) -> None:
    found = prefix_hits.damaged(rig)
    assert found.pop("seconds") < 2.0
    assert found == prefix_hits.FOUND


def test_prefix_hits_that_are_not_compared(rig: Rig, unchecked: Report) -> None:
    found = prefix_hits.tried(rig)
    assert len(found) == 5
    report_walks("vLLM V1", found, unchecked)


def test_the_count_is_that_of_the_pool(rig: Rig) -> None:
    """Under eviction, preemption and resets; the pool's own blocks are counted here."""
    rig.fresh()
    for seed in range(6):
        rig.generate(prompts(6, seed=seed, shared=100), 20)
        rig.step()
        count = rig.adapter.cached_blocks.count("full")
        pool = rig.core.scheduler.kv_cache_manager.block_pool
        assert count is not None
        assert count.slots == 32 * sum(block.block_hash is not None for block in pool.blocks)
        assert count.slots == rig.adapter.cached_blocks.cached("full", unlocked_only=False).slots.numel()
    removed = count.removed
    rig.fresh()
    rig.generate(prompts(1), 2)
    assert rig.adapter.cached_blocks.count("full").removed == removed + count.slots


def test_tables_that_are_not_the_runners(rig: Rig, unchecked: Report) -> None:
    check_tables(stale.tried(rig), {"full"})
    report_tables("vLLM V1", stale.unseen(rig), unchecked)


def report_hidden(engine: str, found: dict[str, dict[str, Any]], unchecked: Report, kind: str = "") -> None:
    shown = found.pop("shown")
    assert shown["coverage"] == 1.0
    assert len(found) == 2
    # An engine attached warm waits for its baselines, too.
    named = [reason for reason in shown["reasons"] for seen in found.values() if seen["names"] in reason]
    assert named == []
    for way, seen in found.items():
        assert seen["coverage"] < 1.0
        verdict = (seen["state"], seen["reasons"])
        unchecked(way + kind, engine, verdict, names=seen["names"], seconds=seen["seconds"])


def test_layers_and_bytes_that_are_hidden(rig: Rig, unchecked: Report) -> None:
    report_hidden("vLLM V1", hidden.tried(rig), unchecked)


@pytest.mark.parametrize("model", ["gemma3", "deepseek"])
def test_what_other_models_hide(make_rig: Any, unchecked: Report, model: str) -> None:
    """Groups that lie over each other in memory, and latents."""
    rig = make_rig(model, **LATENT if model == "deepseek" else {})
    if model == "gemma3":
        hit = prefix_hits.damaged(rig)
        assert hit.pop("seconds") < 5.0
        assert hit == prefix_hits.FOUND
    found = hidden.tried(rig)
    if model == "gemma3":
        report_hidden("vLLM V1", found, unchecked, " of overlaid groups")
    else:
        assert found["shown"] == {"coverage": 1.0, "reasons": []}
        assert any(hidden.LAYERS in reason for reason in found["the adapter hides a layer"]["reasons"])


def test_a_draft_pass_that_is_not_shown(make_rig: Any, models: Any, unchecked: Report) -> None:
    speculation = {"method": "eagle", "model": str(models("llama_eagle")), "num_speculative_tokens": 2}
    rig = make_rig(speculative_config=speculation, async_scheduling=False)
    found = tried(rig)
    assert list(found) == ["a draft pass is not shown"]
    report_forwards("vLLM V1", found, unchecked)
