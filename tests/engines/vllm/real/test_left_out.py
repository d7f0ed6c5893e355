"""Groups that cannot be checked are left out: the others are protected, and the state says what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.engines.vllm import worker
from canary_obs.engines.vllm.block_changes import BlockChanges
from canary_obs.kv_locations import placement
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.test_clean import count_preemptions

# One prefill chunk must not cross a block of states; 24 blocks are handed from group to group all the time.
STATES: dict[str, Any] = {
    "load_format": "dummy", "block_size": None, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 24,
    "max_num_seqs": 4,
}  # fmt: skip


def traffic(rig: Rig, rounds: int = 6) -> list[list[int]]:
    """Prefix hits, evictions, and blocks that change their group."""
    answers = []
    for number in range(rounds):
        answers += rig.generate(prompts(4, seed=number % 3, shared=280, groups=2), 8)
    return answers


def preempt_all(rig: Rig) -> int:
    """Reset the prefix cache while requests run, which are computed again; how many were preempted."""
    preempted = count_preemptions(rig)
    rig.start({str(number): prompt for number, prompt in enumerate(prompts(2, seed=9, groups=2))}, 12)
    rig.step(6)
    assert rig.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.finish()
    return len(preempted)


@pytest.fixture
def states_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are a kind of group that nobody knows."""
    monkeypatch.setattr("canary_obs.engines.vllm.groups.keeps_states", lambda _: False)


@pytest.mark.usefixtures("states_unknown")
def test_attention_beside_states_is_protected(make_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig("falcon_h1", **STATES)
    answers = traffic(rig)
    assert rig.settle() == []
    assert preempt_all(rig)
    assert rig.settle() == []
    assert rig.checks() > 20_000
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    share = 1 - rig.canary.state.coverage
    assert 0.05 < share < 0.95
    assert any("group 1" in text and "MambaSpec" in text and f"{share:.1%}" in text for text in reasons)
    assert "MambaSpec" in caplog.text

    flipped = rig.idle_blocks()[-1]
    rig.layer_cache(0, 0).view(torch.int32)[flipped, 0, 5, 3] ^= 1 << 20
    assert {violation.slot // rig.adapter.vllm_groups[0].block_size for violation in rig.settle()} == {
        flipped
    }
    assert {violation.phase for violation in rig.found} == {Phase.PATROL, Phase.SWEEP}
    assert {violation.reason for violation in rig.found} == {Reason.KV_DATA}

    rig.fresh()
    assert len(rig.generate(prompts(3, seed=4, shared=280), 8)) == 3
    rig.llm.sleep(level=1)
    assert worker.runtime_of(rig.worker) is None
    rig.llm.wake_up()
    rig.collect_from()
    traffic(rig, 2)
    assert rig.settle() == []
    plain = make_rig("falcon_h1", canary={"mode": "none"}, **STATES)
    assert traffic(plain) == answers


@pytest.mark.usefixtures("states_unknown")
def test_blocks_of_a_group_left_out_end_the_records_of_the_others(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, every block that states overwrite is an alarm."""
    assigned = BlockChanges._assigned

    def own(changes: BlockChanges, *given: Any) -> dict[int, set[int]]:
        return {number: blocks for number, blocks in assigned(changes, *given).items() if number == 0}

    monkeypatch.setattr(BlockChanges, "_assigned", own)
    rig = make_rig("falcon_h1", **STATES)
    traffic(rig)
    assert Reason.KV_DATA in {violation.reason for violation in rig.settle()}


def test_a_layout_nobody_explains_costs_its_layer_only(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from canary_obs.engines.vllm import groups

    explained = groups.find_placements

    def find_placements(layer: Any, likely: Any) -> Any:
        if ".2." in layer.name:
            raise placement._unsupported_layout(layer, "bytes all over the place")
        return explained(layer, likely)

    monkeypatch.setattr("canary_obs.engines.vllm.groups.find_placements", find_placements)
    rig = make_rig(num_gpu_blocks_override=80)
    rig.generate(prompts(8), 12)
    assert rig.settle() == []
    (group,) = rig.adapter.vllm_groups
    assert {source.layer for source in group.view.sources} == {0, 1}
    assert rig.canary.state.coverage == pytest.approx(2 / 3)
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    assert any("bytes all over the place" in text and "1 of its 3 layers" in text for text in reasons)
