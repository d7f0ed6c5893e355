"""Drills in a real vLLM: faults in the null block are found and restored, and outputs stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.records import DrillReport, StartDrill
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import DrillOutcome, Phase, Reason
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.server import wait_until


def answers(rig: Rig, *, drills: bool) -> dict[str, list[int]]:
    """What requests are answered, with a drill begun at every step of the engine or none at all."""
    rig.start({f"r{number}": prompt for number, prompt in enumerate(prompts(6))}, tokens=100)
    found: dict[str, list[int]] = {}
    step = 0
    while rig.llm.llm_engine.has_unfinished_requests():
        if drills:
            with rig.adapter.paused():
                rig.canary.drill.start(StartDrill(id=f"d{step}"), rig.canary.step)
        step += 1
        for output in rig.llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return found


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_drill_in_the_null_block_is_found_and_changes_no_token(make_rig: Any, model: str) -> None:
    rig = make_rig(model, canary={"drill_enabled": "true"})
    quiet = answers(rig, drills=False)
    rig.fresh()
    sent: list[Any] = []
    rig.canary.reporter.send = sent.append
    scratch = [locate_byte(source, 0, 0) for source in rig.adapter.vllm_groups[0].view.sources]
    before = [address.read() for address in scratch]
    assert answers(rig, drills=True) == quiet
    findings = [message.finding for message in sent if isinstance(message, DrillReport)]
    detected = [one for one in findings if one.outcome is DrillOutcome.DETECTED]
    # One that is under way refuses the next: nothing else may keep a drill from being detected.
    assert {one.outcome for one in findings} <= {DrillOutcome.DETECTED, DrillOutcome.REFUSED}
    assert len(detected) > 20
    assert {(one.phase, one.reason, one.slot) for one in detected} == {(Phase.PATROL, Reason.KV_DATA, 0)}
    assert all(one.latency_steps <= 1 for one in detected)
    assert rig.settle() == []
    rig.canary.drill.close()
    assert [address.read() for address in scratch] == before


def test_a_fault_that_is_found_while_idle_is_reported_and_restored(make_rig: Any, caplog: Any) -> None:
    """vLLM's tensors were made in inference mode; the idle thread is outside of it."""
    injected = {"perturb": "real_kv_unused_cache=1", "perturb_enabled": "true", "perturb_limit": "1"}
    rig = make_rig(canary=injected | {"perturb_warmup": "2"})
    rig.generate(prompts(3), 6)
    rig.generate(prompts(3, seed=1), 6)
    injections = rig.canary.injector.injections
    wait_until(lambda: injections.summary()["real_kv_unused_cache"]["detected"])
    assert {found.reason for found in rig.found} == {Reason.KV_DATA}
    assert not rig.canary.health.faults
    assert any("KV cache violation: reason=kv_data" in line for line in caplog.messages)
    found = len(rig.found)
    assert len(rig.settle()) == found, "the bytes are right again"
