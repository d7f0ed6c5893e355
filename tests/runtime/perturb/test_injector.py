"""Injections end as detected or masked, never as missed; mode raise stops the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from canary_kernels import layout
from canary_obs.engine_api.views import StepView
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.errors import ConfigurationError, KVCacheViolation
from canary_obs.records import Violation
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.perturb import flips
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.runtime.perturb.injection_log import InjectionLog
from canary_obs.runtime.perturb.target import Target
from canary_obs.vocabulary import Mode, Part, PerturbMode, Phase, Reason
from tests.sizes import sized

NONE = torch.zeros(0, dtype=torch.int64)
EMPTY = StepView(
    request_ids=(), rows=NONE, prefix_lens=NONE, extend_lens=NONE, token_starts=NONE, input_ids=NONE,
    positions=NONE, digests=None, groups={},
)  # fmt: skip
MODES = [mode.value for mode in PerturbMode]
EXPECTED = {
    "req_to_token": {Reason.POSITION, Reason.CHAIN, Reason.UNWRITTEN},
    "next_token_swap": {Reason.WRITE_TOKEN, Reason.TOKEN, Reason.CHAIN},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", sized([1, 16], [16]))
def test_every_injection_is_accounted_for(make_rig, mode: str, page_size: int) -> None:
    rig = make_rig(
        perturb=f"{mode}=0.2", perturb_enabled=True, perturb_seed=7, patrol_budget="50%",
        sweep_interval=40, engine={"page_size": page_size},
    )  # fmt: skip
    rig.run(sized(500, 150))
    rig.canary.check_everything()
    tally = rig.canary.injector.injections.summary()[mode]
    assert tally["injected"] > sized(25, 7)
    assert tally["detected"] > 0.8 * tally["injected"]
    assert tally["detected"] + tally["masked"] == tally["injected"]
    assert (tally["missed"], tally["open"]) == (0, 0)
    assert set(tally["masked_because"]) == set(tally["masked_because"]) - {""}
    reasons = {
        r
        for v in [rig.canary.counter_reader.sample.values]
        for r in range(layout.NUM_REASONS)
        if int(v[r : layout.NUM_LANES : layout.NUM_REASONS].sum())
    }
    order = list(Reason)
    assert {order[r] for r in reasons} <= EXPECTED.get(mode, {Reason.KV_DATA})


@pytest.mark.parametrize("mode", ["real_kv_used", "real_kv_unused_cache", "real_kv_post_forward"])
def test_only_bytes_that_lie_on_this_rank_are_changed(make_rig, monkeypatch, mode: str) -> None:
    rig = make_rig(perturb=f"{mode}=0.5", perturb_enabled=True, perturb_seed=7)
    monkeypatch.setattr(Target, "has_bytes", lambda _, slot: slot % 2 == 1)
    slots = []
    monkeypatch.setattr(flips, "locate_byte", lambda *at: (slots.append(at[1]), locate_byte(*at))[1])
    rig.run(60)
    assert len(slots) > 5
    assert {slot % 2 for slot in slots} == {1}


def test_without_checks_injections_are_missed(make_rig) -> None:
    rig = make_rig(
        perturb="real_kv_used=0.5",
        perturb_enabled=True,
        patrol_budget="off",
        reuse_data=False,
        verify_on_hit=False,
        idle_sweep=False,
    )
    rig.run(200)
    tally = rig.canary.injector.injections.summary()["real_kv_used"]
    assert tally["detected"] == 0
    assert tally["missed"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_mode_raise_stops_the_engine_with_full_evidence(make_rig, mode: str) -> None:
    rig = make_rig(mode=Mode.RAISE, perturb=f"{mode}=0.5", perturb_enabled=True, patrol_budget="100%")
    with pytest.raises(KVCacheViolation) as caught:
        rig.run(400)
    first = caught.value.violations[0]
    text = str(caught.value)
    for field in ("reason", "phase", "group", "slot", "position", "request"):
        assert f"{field}=" in text
    assert f"slot={first.slot}" in text
    assert first.group == "full"
    if mode in ("req_to_token", "real_kv_used", "next_token_swap"):
        assert first.request is not None
    assert first.reason in EXPECTED.get(mode, {Reason.KV_DATA})


def test_a_violation_of_states_names_a_request_that_runs(make_rig) -> None:
    rig = make_rig(
        model="compressed", mode=Mode.RAISE, perturb="req_to_token=1", perturb_enabled=True,
        perturb_group="c4_state", patrol_budget="off",
    )  # fmt: skip
    with pytest.raises(KVCacheViolation) as caught:
        rig.run(100)
    found = [violation for violation in caught.value.violations if violation.group == "c4_state"]
    assert found
    assert {violation.request for violation in found} <= {request.id for request in rig.engine.unfinished}


@pytest.mark.parametrize(
    ("model", "group", "rule"),
    [
        ("llama", "swa", "KV_CANARY_PERTURB_GROUP='swa': the engine has no such group. .* Groups are: full."),
        ("swa", "", "KV_CANARY_PERTURB_GROUP='': the engine has 2 groups. Name .* Groups are: full, swa."),
    ],
)
def test_a_group_that_is_unknown_or_not_named_is_refused(make_rig, model: str, group: str, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        make_rig(model=model, perturb="real_kv_used=0.5", perturb_enabled=True, perturb_group=group)


@pytest.mark.parametrize("shown", ["has_digests", "has_known_tokens", "expected_ids"])
def test_a_swap_of_tokens_needs_tokens_to_compare_with(make_rig, monkeypatch, shown: str) -> None:
    none = replace(ReferenceAdapter.step_types, has_digests=False, has_known_tokens=False, expected_ids=None)
    monkeypatch.setattr(ReferenceAdapter, "step_types", none)
    with pytest.raises(ConfigurationError, match=r"no tokens to compare .* Leave out next_token_swap"):
        make_rig(perturb="next_token_swap=0.5", perturb_enabled=True)
    make_rig(perturb="real_kv_used=0.5", perturb_enabled=True)
    monkeypatch.setattr(ReferenceAdapter, "step_types", replace(none, **{shown: torch.int64}))
    make_rig(perturb="next_token_swap=0.5", perturb_enabled=True)


def test_a_swap_of_tokens_is_found_at_both_slots_and_in_no_bytes(make_rig) -> None:
    rig = make_rig(
        perturb="next_token_swap=1", perturb_enabled=True, perturb_limit=1, patrol_budget="50%",
        sweep_interval=40,
    )  # fmt: skip
    made, found = collected(rig)
    rig.run(100)
    rig.canary.check_everything()
    (injection,) = made
    assert (injection.outcome, injection.reason, injection.latency_steps) == (
        Outcome.DETECTED, Reason.WRITE_TOKEN, 0,
    )  # fmt: skip
    at_once = {(row.phase, row.reason, row.group, row.slot) for row in found if row.step == injection.step}
    assert at_once == {(Phase.HEAD, Reason.WRITE_TOKEN, *place) for place in injection.also}
    assert [row for row in found if not injection.explains(row)] == []


def collected(rig) -> tuple[list[Injection], list[Violation]]:
    """What is injected and what is found from now on."""
    made: list[Injection] = []
    found: list[Violation] = []
    injector = rig.canary.injector
    add, match = injector.injections.add, injector.match
    injector.injections.add = lambda injection: (made.append(injection), add(injection))
    injector.match = lambda rows, *, settled: (found.extend(rows), match(rows, settled=settled))
    return made, found


def test_what_was_drawn_and_cannot_be_made_is_skipped(make_rig) -> None:
    rig = make_rig(perturb="real_kv_used=1,real_kv_unused_cache=1", perturb_enabled=True, perturb_limit=2)
    rig.run(60)
    summary = rig.canary.injector.injections.summary()
    limit = [summary[mode]["skipped"]["the limit of 2 injections is reached"] for mode in summary]
    assert min(limit) > 10
    # One draw per forward and mode after the warm-up.
    draws = [summary[mode]["injected"] + sum(summary[mode]["skipped"].values()) for mode in summary]
    assert draws == [rig.canary.step - 20] * 2


def test_forwards_without_the_group_are_skipped(make_rig) -> None:
    rig = make_rig(
        perturb="real_kv_used=1", perturb_enabled=True, perturb_group="draft", engine={"draft_layers": 1}
    )
    rig.run(60)
    skipped = rig.canary.injector.injections.summary()["real_kv_used"]["skipped"]
    assert skipped["the forward does not use the group"] > 10


def test_a_table_entry_is_right_again_after_a_forward_that_failed(make_rig, monkeypatch) -> None:
    rig = make_rig(perturb="req_to_token=1", perturb_enabled=True, perturb_limit=1)
    made, _ = collected(rig)
    table, before = rig.engine.runner.pool.req_to_token, []
    forward = rig.engine.runner.model.forward

    def fail(*given: object) -> object:
        if made and not before:
            before.append(table.clone())
            raise RuntimeError("planted")
        return forward(*given)

    monkeypatch.setattr(rig.engine.runner.model, "forward", fail)
    with pytest.raises(RuntimeError, match="planted"):
        rig.run(200)
    rig.canary.injector.before_forward(EMPTY, rig.canary.step)
    (injection,) = made
    assert (injection.outcome, injection.why) == (Outcome.MASKED, "the forward failed")
    assert int((table != before[0]).sum()) == 1


def violation(**changes: object) -> Violation:
    fields: dict[str, object] = {
        "phase": Phase.PATROL, "reason": Reason.KV_DATA, "group": "full", "part": Part.K, "step": 9,
        "event": 1, "slot": 4, "position": 2, "request": None, "expected": None, "actual": None,
        "lag_steps": 0,
        "time_ns": 2_000_000,
    }  # fmt: skip
    return Violation(**fields | changes)  # type: ignore[arg-type]


def test_only_a_violation_that_the_injection_explains_matches() -> None:
    injections = InjectionLog((PerturbMode.REAL_KV_USED,))
    injections.add(Injection(mode=PerturbMode.REAL_KV_USED, group="full", slot=4, step=5, time_ns=1_000_000))
    others = [violation(slot=5), violation(group="swa"), violation(reason=Reason.CHAIN), violation(step=4)]
    assert injections.match(others) == []
    (found,) = injections.match([*others, violation()])
    assert (found.outcome, found.latency_steps, found.latency_ms) == (Outcome.DETECTED, 4, 1.0)
    assert injections.counts()[PerturbMode.REAL_KV_USED].detected == 1


def test_a_redirect_may_show_in_an_adjacent_slot() -> None:
    injections = InjectionLog((PerturbMode.REQ_TO_TOKEN,))
    mode, also = PerturbMode.REQ_TO_TOKEN, frozenset({("full", 6)})
    injections.add(Injection(mode=mode, group="full", slot=4, also=also, step=5, time_ns=1_000_000))
    assert injections.match([violation(reason=Reason.CHAIN, slot=5), violation(slot=6)]) == []
    (found,) = injections.match([violation(reason=Reason.CHAIN, slot=6)])
    assert found.outcome is Outcome.DETECTED


def test_a_limit_ends_injections(make_rig) -> None:
    rig = make_rig(perturb="real_kv_used=1,real_kv_unused_cache=1", perturb_enabled=True, perturb_limit=3)
    rig.run(150)
    counts = rig.canary.injector.injections.counts().values()
    assert sum(count.injected for count in counts) == 3
    assert sum(sum(count.latency.counts) for count in counts) == sum(count.detected for count in counts)


def test_an_injector_that_fails_holds_back_no_violation(make_rig, monkeypatch, caplog) -> None:
    rig = make_rig(
        perturb="real_kv_post_forward=1", perturb_enabled=True, perturb_limit=1, patrol_budget="100%"
    )
    sent: list[Violation] = []
    send = rig.canary.reporter.send_violations
    monkeypatch.setattr(
        rig.canary.reporter, "send_violations", lambda found: (sent.extend(found), send(found))
    )

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(rig.canary.injector, "match", fail)
    rig.run(60)
    rig.canary.check_everything()
    assert {found.reason for found in sent} == {Reason.KV_DATA}
    assert rig.canary.health.faults["perturbation"] > 0
    assert any("KV cache violation: reason=kv_data" in line for line in caplog.messages)
