"""Injections end as detected or masked, never as missed; mode raise stops the engine."""

from __future__ import annotations

import pytest

from canary_kernels import layout
from canary_obs.errors import ConfigurationError, KVCacheViolation
from canary_obs.records import Violation
from canary_obs.runtime.perturb.injection_log import Injection, InjectionLog, Outcome
from canary_obs.vocabulary import Mode, Part, PerturbMode, Phase, Reason

MODES = [mode.value for mode in PerturbMode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_injection_is_accounted_for(make_rig, mode: str, page_size: int) -> None:
    rig = make_rig(
        perturb=f"{mode}=0.2", perturb_enabled=True, perturb_seed=7, patrol_budget="50%",
        sweep_interval=40, engine={"page_size": page_size},
    )  # fmt: skip
    rig.run(500)
    rig.canary.check_everything()
    tally = rig.canary.injector.injections.summary()[mode]
    assert tally["injected"] > 25
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
    expected = (
        {Reason.KV_DATA} if mode != "req_to_token" else {Reason.POSITION, Reason.CHAIN, Reason.UNWRITTEN}
    )
    order = list(Reason)
    assert {order[r] for r in reasons} <= expected


def test_without_checks_injections_are_missed(make_rig) -> None:
    rig = make_rig(
        perturb="real_kv_used=0.5",
        perturb_enabled=True,
        patrol_budget="off",
        reuse_data=False,
        verify_on_hit=False,
        idle_sweep=False,
    )
    rig.run(400)
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
    if mode in ("req_to_token", "real_kv_used"):
        assert first.request is not None
    if mode == "req_to_token":
        assert first.reason in (Reason.POSITION, Reason.CHAIN, Reason.UNWRITTEN)
    else:
        assert first.reason is Reason.KV_DATA


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


def test_an_unknown_group_is_refused(make_rig) -> None:
    with pytest.raises(ConfigurationError, match="Groups are: full"):
        make_rig(perturb="real_kv_used=0.5", perturb_enabled=True, perturb_group="swa")


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
    mode, also = PerturbMode.REQ_TO_TOKEN, frozenset({6})
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
