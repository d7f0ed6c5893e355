"""Forwards that the engine ran, by its own count, against those that were checked."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime import forward_account, step_scheduler
from canary_obs.vocabulary import State
from tests.sizes import sized
from tests.unchecked import Report

NOT_SHOWN = "forwards were not shown or not checked"


def bypass_forward(rig) -> None:
    """The engine's forwards run without the canary's hook; steps are observed as before."""
    runner = rig.engine.runner
    vars(runner).pop("forward")


def test_a_clean_engine_is_in_balance(make_rig) -> None:
    rig = make_rig(idle_sweep_seconds=1e-6)
    rig.run(120)
    rig.finish_requests()
    rig.engine.idle()
    account = rig.canary.forwards
    assert account.counted == account.checked == {"full": rig.engine.statistics.steps}
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("model", ["llama", "swa", *sized(["compressed"], [])])
def test_a_hook_that_is_not_called(make_rig, unchecked: Report, model: str) -> None:
    rig = make_rig(model=model, patrol_budget="50%", sweep_interval=3)
    rig.run(60)
    assert rig.canary.verdict() == (State.OK, ())
    bypass_forward(rig)
    started = time.monotonic()
    rig.run(1)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    assert verdict[0] is State.BLIND
    if model == "llama":
        unchecked(
            "the forward's hook is not called, the step's is", "reference", verdict, names=NOT_SHOWN,
            seconds=seconds,
        )  # fmt: skip
    # Sweeps and patrol go on, and accuse none of the slots that were written meanwhile.
    rig.run(80)
    rig.finish_requests()
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0


@pytest.mark.parametrize("ends", ["check_everything", "detach"])
def test_a_short_step_that_was_not_shown_is_seen_at_the_end(
    make_rig, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """On a GPU a short step runs no task, and nothing looks at the engine's count in it."""
    rig = make_rig(patrol_budget="off", idle_sweep=False)
    rig.run(60)
    rig.canary._scheduler._rotating = True
    monkeypatch.setattr(step_scheduler, "_SECONDS_BETWEEN_TASKS", float("inf"))
    bypass_forward(rig)
    rig.run(1)
    assert rig.canary.verdict() == (State.OK, ())
    getattr(rig.canary, ends)()
    state, reasons = rig.canary.verdict()
    assert state is State.BLIND
    assert any(NOT_SHOWN in reason for reason in reasons)
    assert rig.canary.counter_reader.violations == 0


def test_a_draft_pass_that_is_not_shown(make_rig, unchecked: Report) -> None:
    rig = make_rig(engine={"draft_layers": 1}, patrol_budget="50%", sweep_interval=3)
    rig.run(60)
    assert rig.canary.verdict() == (State.OK, ())
    vars(rig.engine.drafter.runner).pop("forward")
    started = time.monotonic()
    rig.run(3)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    unchecked("a draft pass is not shown", "reference", verdict, names=NOT_SHOWN, seconds=seconds)
    # Among others: on a slow machine the slots that it adopted still wait for their baselines.
    assert f"{NOT_SHOWN}: draft {rig.canary.forwards._missing['draft']}" in verdict[1]
    rig.run(100)
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0


def test_hooks_that_do_not_reach_the_canary_at_all(
    make_rig, unchecked: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither forwards nor steps nor idle times: a verdict asks the engine; its service misses snapshots."""
    monkeypatch.setattr(forward_account, "_SILENT_SECONDS", 0.05)
    rig = make_rig()
    bypass_forward(rig)
    for name in ("step", "idle"):
        vars(rig.engine).pop(name)
    started = time.monotonic()
    while rig.canary.verdict()[0] is State.OK:
        assert time.monotonic() - started < 5.0
        rig.run(1)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    assert rig.canary.step == 0
    way = "hooks never reach the canary"
    unchecked(way, "reference", verdict, names=NOT_SHOWN, seconds=seconds + 1)


def test_hits_after_a_forward_that_was_not_shown_accuse_nobody(make_rig) -> None:
    """A hit is compared before its forward begins, so it asks for earlier ones that were not shown."""
    rig = make_rig(verify_on_hit=True, idle_sweep=False, patrol_budget="off", reuse_data=False)

    def ask(number: int) -> None:
        prompt = np.arange(40, dtype=np.int32) + 5 * number + 1
        rig.engine.add_request(prompt, Sampling(max_tokens=2))
        rig.finish_requests()

    for number in range(10):  # every slot has a record
        ask(number)
    hooks = [(owner, dict(vars(owner))) for owner in (rig.engine.runner, rig.engine)]
    bypass_forward(rig)
    for name in ("step", "idle"):
        vars(rig.engine).pop(name)
    for number in range(10, 20):
        ask(number)
    for owner, before in hooks:
        vars(owner).update({name: before[name] for name in ("forward", "step", "idle") if name in before})
    hits = rig.engine.statistics.prefix_hit_tokens
    ask(19)
    assert rig.engine.statistics.prefix_hit_tokens > hits
    rig.canary.delivery.drain(5.0)
    assert rig.canary.counter_reader.violations == 0


def test_what_a_load_writes_over_after_forwards_that_were_not_shown_accuses_nobody(make_rig) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    for number in range(12):
        rig.engine.add_request(np.arange(40, dtype=np.int32) + 5 * number + 1, Sampling(max_tokens=2))
        if number == 10:
            bypass_forward(rig)
            for name in ("step", "idle"):
                vars(rig.engine).pop(name)
        rig.finish_requests()
    assert rig.canary.counter_reader.violations == 0
    rig.canary.before_load("full", torch.arange(rig.canary.state.by_name["full"].view.num_slots))
    rig.canary.delivery.drain(5.0)
    assert rig.canary.counter_reader.violations == 0
    assert any("forwards were not shown" in reason for reason in rig.canary.verdict()[1])


def test_a_forward_that_is_begun_and_never_checked(make_rig, unchecked: Report) -> None:
    rig = make_rig()
    rig.run(20)
    rig.canary.checks.tail = lambda: None
    started = time.monotonic()
    rig.run(1)
    way = "a forward's last checks are not launched"
    unchecked(
        way, "reference", rig.canary.verdict(), names=NOT_SHOWN, seconds=time.monotonic() - started
    )  # fmt: skip


def test_a_forward_that_fails_is_accounted_for(make_rig) -> None:
    rig = make_rig()
    rig.run(20)
    model = rig.engine.runner.model
    forward = model.forward
    model.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rig.run(1)
    model.forward = forward
    assert rig.canary.forwards.reasons() == []
    assert rig.canary.forwards.counted == rig.canary.forwards.checked


def test_an_acknowledged_difference_is_reported_again_when_it_grows(make_rig) -> None:
    rig = make_rig(verify_on_hit=False)  # else hits are missing, too
    bypass_forward(rig)
    rig.run(7)
    assert rig.canary.verdict() == (State.BLIND, (f"{NOT_SHOWN}: full 7",))
    rig.canary.forwards.acknowledge()
    assert rig.canary.verdict() == (State.OK, ())
    rig.run(2)
    state, reasons = rig.canary.verdict()  # a slow machine may also say that slots wait for their baseline
    assert (state, reasons[0]) == (State.BLIND, f"{NOT_SHOWN}: full 2")


def test_a_forward_that_the_engine_did_not_count(make_rig, unchecked: Report) -> None:
    """The engine's count has stopped: it would not notice a forward that is not shown."""
    rig = make_rig()
    rig.run(10)
    rig.engine.statistics.forwards -= 3
    started = time.monotonic()
    rig.run(1)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    names = "forwards were shown that the engine did not count"
    assert verdict == (State.DEGRADED, (f"{names}: full 3",))
    unchecked("the engine's count of forwards stops", "reference", verdict, names=names, seconds=seconds)


def test_an_engine_that_does_not_count(make_rig, unchecked: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    monkeypatch.setattr(rig.canary.forwards, "_counts", lambda: None)
    rig.run(10)
    unchecked(
        "the engine does not count its forwards", "reference", rig.canary.verdict(),
        names="this engine does not count its forwards", seconds=0.0,
    )  # fmt: skip


def test_a_step_that_begins_while_an_idle_call_looks(make_rig) -> None:
    """The engine counts before the hook of the forward: nothing is compared, and nothing is accused."""
    rig = make_rig(idle_sweep_seconds=1e-6)
    rig.run(20)
    rig.engine.statistics.forwards += 1
    tasks = rig.canary._scheduler.idle
    rig.canary._scheduler.idle = lambda: pytest.fail("a step is about to run")
    assert rig.canary.idle()
    assert rig.canary.verdict() == (State.OK, ())
    rig.engine.statistics.forwards -= 1  # that forward is the next one
    rig.run(1)
    rig.canary._scheduler.idle = tasks
    rig.canary.idle()
    assert rig.canary.verdict() == (State.OK, ())
    rig.engine.statistics.forwards += 1
    rig.canary.idle()
    rig.canary.idle()
    assert f"{NOT_SHOWN}: full 1" in rig.canary.verdict()[1]


@pytest.mark.parametrize("look", ["settle_idle", "settle_at_rest"])
def test_a_step_that_begins_within_an_idle_call(make_rig, monkeypatch: pytest.MonkeyPatch, look: str) -> None:
    """The engine's thread counts a forward just after another thread has looked."""
    rig = make_rig()
    rig.run(20)
    account = rig.canary.forwards
    counts = iter([dict(account._ended), {name: count + 1 for name, count in account._ended.items()}])
    monkeypatch.setattr(account, "_counts", lambda: next(counts, None))
    getattr(account, look)()
    monkeypatch.undo()
    assert account.reasons() == []
    rig.run(20)
    assert rig.canary.verdict() == (State.OK, ())


def test_slots_are_adopted_before_the_next_forward_is_checked(make_rig) -> None:
    """Without a hook between the two forwards."""
    rig = make_rig(patrol_budget="50%")
    rig.run(60)
    patched = vars(rig.engine.runner).pop("forward"), vars(rig.engine).pop("step")
    rig.run(30)
    vars(rig.engine.runner)["forward"], vars(rig.engine)["step"] = patched
    rig.run(30)
    rig.finish_requests()
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0
    assert f"{NOT_SHOWN}: full 30" in rig.canary.verdict()[1]


def test_forwards_before_the_start_are_not_missed() -> None:
    engine = Engine(tiny(seed=3))
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 3)
    canary = None
    for steps in (20, 40):
        while engine.statistics.steps < steps:
            traffic.advance(engine)
            engine.step()
        if canary is None:
            canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, idle_sweep=False))
            assert canary is not None
            canary.mark_ready()
    assert canary.forwards.checked == {"full": 20}
    assert canary.forwards.reasons() == []
    canary.detach()


def test_a_step_that_lasts_is_not_blind(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's forward is counted with the step, and begins after the target's."""
    rig = make_rig()
    rig.run(5)
    account, counted, steps = rig.canary.forwards, rig.canary.forwards.counted, []
    monkeypatch.setattr(forward_account, "_SILENT_SECONDS", -1.0)
    monkeypatch.setattr(account, "_counts", lambda: {name: n + len(steps) for name, n in counted.items()})
    for under_way, missing in ((True, 0), (False, 1)), ((True, 1), (False, 2)):
        steps.append(None)
        for in_step, expected in (under_way, missing):
            monkeypatch.setattr(account, "in_step", lambda in_step=in_step: in_step)
            texts = [text for _, text in account.reasons()]
            assert texts == ([f"forwards were not shown or not checked: full {expected}"] if expected else [])
