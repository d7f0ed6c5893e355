"""What raised false alarms in a prototype: each trap is entered, and its handling is what keeps it quiet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.engines.vllm import draft_groups, groups
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.block_changes import BlockChanges
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Cause, ObserverPart, Reason, State
from tests.engines.vllm.real.rig import Rig, count_sampled, prompts
from tests.engines.vllm.real.test_left_out import STATES


def unverified(rig: Rig, cause: Cause) -> int:
    counters = group_counters(rig.canary.state, rig.canary.counter_reader)
    return sum(group.unverified[cause] for group in counters.values())


def test_prefix_written_by_the_same_batch(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are published when scheduled: a request may hit blocks that its own batch fills."""
    rig = make_rig(max_num_batched_tokens=1024)
    rig.generate([[*prompt, 7] for prompt in prompts(2, groups=1)], 4)
    assert rig.settle() == []
    assert unverified(rig, Cause.PENDING) >= 192
    # Without the engine's own digests the second request's chain starts from a record not written yet.
    complete = rig.adapter.complete_view
    monkeypatch.setattr(rig.adapter, "complete_view", lambda view: _replace(complete(view), digests=None))
    rig.generate([[*prompt, 7] for prompt in prompts(2, groups=1, seed=5)], 4)
    assert rig.settle() != []


def _replace(view: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(view, **changes)


@pytest.mark.parametrize("handled", [True, False])
def test_blocks_out_of_the_window(make_rig: Any, monkeypatch: pytest.MonkeyPatch, handled: bool) -> None:
    """The worker's table keeps naming blocks that a sliding window has given back."""
    if not handled:
        attention = groups._attention
        monkeypatch.setattr(groups, "_attention", lambda *args: (attention(*args)[0], None))
    rig = make_rig("mistral", num_gpu_blocks_override=40)
    rig.generate(prompts(16), 16)
    assert (rig.settle() == []) is handled


@pytest.mark.parametrize("handled", [True, False])
def test_draft_layers(make_rig: Any, models: Any, monkeypatch: pytest.MonkeyPatch, handled: bool) -> None:
    """A draft model shares the target's blocks and writes them later."""
    if not handled:
        monkeypatch.setattr(groups, "draft_layers", lambda _: frozenset())
    speculation = {"method": "draft_model", "model": str(models("llama_draft")), "num_speculative_tokens": 3}
    rig = make_rig(speculative_config=speculation, max_model_len=512, async_scheduling=False)
    rig.generate(prompts(6), 16)
    assert (rig.settle() == []) is handled
    if not handled:
        return
    assert [(group.name, len(group.view.sources)) for group in rig.canary.state.groups] == [
        ("full", 6),
        ("draft", 2),
    ]
    draft = group_counters(rig.canary.state, rig.canary.counter_reader)["draft"]
    assert draft.completed > 1000
    # Every slot that drafting wrote is checked; what it left out would be unverified.
    assert sum(draft.unverified.values()) < sum(draft.verified.values()) / 20
    rig.draft_cache()[rig.idle_blocks()[0]].view(torch.int32)[1, 7, 3] ^= 1 << 11
    assert {(violation.group, violation.reason) for violation in rig.settle()} == {("draft", Reason.KV_DATA)}


@pytest.mark.parametrize("handled", [True, False])
def test_slots_behind_the_target_s(
    make_rig: Any, models: Any, monkeypatch: pytest.MonkeyPatch, handled: bool
) -> None:
    """Proposals are put where earlier ones, that were rejected, have records."""
    if not handled:
        monkeypatch.setattr(draft_groups, "drafted_tokens", lambda _: 0)
    speculation = {"method": "eagle", "model": str(models("llama_eagle")), "num_speculative_tokens": 3}
    # So few tokens per step that proposals are not always scheduled.
    rig = make_rig(
        speculative_config=speculation, max_model_len=512, async_scheduling=False,
        max_num_batched_tokens=32, num_gpu_blocks_override=60,
    )  # fmt: skip
    sampled = count_sampled(rig)
    rig.start({str(number): prompt for number, prompt in enumerate(prompts(10, shared=20))}, 10)
    while rig.llm.llm_engine.has_unfinished_requests():
        rig.step()
        rig.settle()
    assert (rig.found == []) is handled
    assert sampled >= {1, 2}


@pytest.mark.parametrize(("owner", "method"), [("drafter", "propose"), ("model", "forward")])
def test_drafting_that_fails_leaves_slots_unverified(
    make_rig: Any, models: Any, monkeypatch: pytest.MonkeyPatch, owner: str, method: str
) -> None:
    speculation = {"method": "eagle", "model": str(models("llama_eagle")), "num_speculative_tokens": 3}
    rig = make_rig(speculative_config=speculation, max_model_len=512, async_scheduling=False)
    rig.start({str(number): prompt for number, prompt in enumerate(prompts(2))}, 40)
    rig.step(4)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(getattr(rig.runner, owner), method, broken)
    adoptions = rig.canary.state.adoptions.count
    with pytest.raises(RuntimeError, match="not today"):
        rig.step()
    assert rig.canary.state.adoptions.count > adoptions
    assert not rig.adapter._drafts.pending, "the idle thread would wait for good"
    assert rig.settle() == []
    assert not rig.canary.health.faults


def test_draft_layers_that_cannot_be_followed_are_missing_from_the_coverage(
    make_rig: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "drafter_is_known", lambda _: False)
    speculation = {"method": "draft_model", "model": str(models("llama_draft")), "num_speculative_tokens": 3}
    rig = make_rig(speculative_config=speculation, max_model_len=512, async_scheduling=False)
    rig.generate(prompts(2), 8)
    assert rig.settle() == []
    assert rig.canary.state.coverage == 3 / 4
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    assert reasons == ("75.0% of KV bytes protected, target 99.0%",)


@pytest.mark.parametrize("handled", [True, False])
def test_blocks_loaded_by_a_connector(make_rig: Any, monkeypatch: pytest.MonkeyPatch, handled: bool) -> None:
    """Loaded bytes have no record: they are adopted and counted, not condemned."""
    if not handled:
        monkeypatch.setattr("canary_obs.engines.vllm.pending_events._record_loads", lambda *_: None)
    module = "tests.engines.vllm.real.copying_connector"
    connector = {
        "kv_connector": "CopyingConnector", "kv_role": "kv_both", "kv_connector_module_path": module,
    }  # fmt: skip
    rig = make_rig(kv_transfer_config=connector)
    asked = [prompt[:230] for prompt in prompts(1, shared=230)]
    rig.generate(asked, 2)
    assert rig.llm.reset_prefix_cache()
    other = rig.generate(prompts(3, seed=4), 2)  # takes the blocks that the first prompt had
    assert other
    rig.generate(asked, 2)
    assert (rig.settle() == []) is handled
    if handled:
        assert unverified(rig, Cause.BASELINE) > 0


@pytest.mark.parametrize("handled", [True, False])
def test_copied_blocks(make_rig: Any, monkeypatch: pytest.MonkeyPatch, handled: bool) -> None:
    """Copy on write moves bytes between blocks: their records go with them."""
    rig = make_rig()
    rig.generate(prompts(4), 4)
    source, destination = rig.idle_blocks()[:2]
    if not handled:
        monkeypatch.setattr(rig.canary, "copied", lambda *_: None)
    schedule = rig.core.scheduler.schedule

    def with_copy(*given: Any) -> Any:
        output = schedule(*given)
        output.kv_cache_block_copies = [(source, destination)]
        # The pool would have withdrawn the destination when it gave it to a request.
        output.kv_canary_block_events = (*output.kv_canary_block_events, destination)
        rig.core.scheduler.schedule = schedule
        return output

    rig.core.scheduler.schedule = with_copy
    rig.generate([list(range(50, 80))], 2)
    assert (rig.settle() == []) is handled


@pytest.mark.parametrize("handled", [True, False])
def test_groups_that_overlay_the_same_bytes(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, handled: bool
) -> None:
    """A block handed from one hybrid group to another ends the first one's records."""
    if not handled:
        monkeypatch.setattr(BlockChanges, "_assigned", lambda *_: {})
    rig = make_rig("gemma3", num_gpu_blocks_override=90)
    rig.generate(prompts(12), 8)
    rig.generate(prompts(12, seed=9), 8)
    assert (rig.settle() == []) is handled


@pytest.mark.parametrize("model", ["gemma3", "falcon_h1"])
@pytest.mark.parametrize("handled", [True, False])
def test_unknown_records_where_groups_overlay_the_same_bytes(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, model: str, handled: bool
) -> None:
    """A block that has none of a group's tokens gets no baseline there: another group writes to it."""
    if not handled:
        monkeypatch.setattr(VllmAdapter, "foreign_slots", lambda *_: None)
    rig = make_rig(model, **(STATES if model == "falcon_h1" else {"num_gpu_blocks_override": 120}))
    rig.generate(prompts(12), 8)
    rig.start({str(number): prompt for number, prompt in enumerate(prompts(6, seed=9))}, 40)
    rig.step(12)
    with rig.adapter.paused():
        rig.canary.fault(ObserverPart.ANNOUNCE, RuntimeError("planted"))
        rig.canary.check_everything()  # takes all baselines
    rig.finish()
    rig.generate(prompts(12, seed=3), 8)
    assert (rig.settle() == []) is handled


@pytest.mark.parametrize("model", ["gemma3", "falcon_h1"])
@pytest.mark.parametrize("to", ["requests that go on", "a new one"])
def test_blocks_given_in_an_output_that_failed_to_be_followed(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, model: str, to: str
) -> None:
    """The other groups' records of them are unknown by then, and get no baseline."""
    rig = make_rig(model, **(STATES if model == "falcon_h1" else {"num_gpu_blocks_override": 120}))
    rig.generate(prompts(12), 8)
    rig.start({str(number): prompt for number, prompt in enumerate(prompts(6, seed=9))}, 40)
    rig.step(6)
    change, failed = rig.adapter._steady.change, list[int]()

    def fails_once(output: Any, *given: Any) -> Any:
        new = bool(output.scheduled_new_reqs)
        if not failed and (new if to == "a new one" else any(output.scheduled_cached_reqs.new_block_ids)):
            failed.append(1)
            raise RuntimeError("planted")
        return change(output, *given)

    monkeypatch.setattr(rig.adapter._steady, "change", fails_once)
    rig.start({"new": prompts(1, seed=5)[0]}, 200)
    rig.finish()
    rig.generate(prompts(12, seed=3), 8)
    assert rig.settle() == []
    assert failed
    assert rig.canary.health.faults.total() == 1
    assert rig.canary.verdict()[0] is State.BLIND
