from __future__ import annotations

import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.config import CanaryConfig
from canary_obs.records import DrillReport, StartDrill
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.runtime.perturb import drill
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import DrillOutcome, Phase, Reason, State
from tests.links import OneThreadLink


def reports(link: LocalLink) -> list:
    found = []
    while (message := link.next_message(0.0)) is not None:
        if isinstance(message, DrillReport):
            found.append(message.finding)
    return found


def send_drill(link: LocalLink, name: str) -> None:
    link.send_command(StartDrill(id=name))


@pytest.fixture
def link():
    return OneThreadLink()


@pytest.mark.parametrize("model", sorted(settings.MODELS))
def test_an_injected_fault_is_detected_restored_and_no_violation(make_rig, link, model):
    rig = make_rig(link=link, model=model, drill_enabled=True, patrol_budget="off")
    rig.run(20)
    for number in range(4):
        send_drill(link, f"d{number}")
        rig.run(6)
    found = reports(link)
    assert [(one.id, one.outcome, one.error) for one in found] == [
        (f"d{number}", DrillOutcome.DETECTED, None) for number in range(4)
    ]
    assert {(one.group, one.phase, one.reason) for one in found} == {("full", Phase.PATROL, Reason.KV_DATA)}
    steps = 4 if model == "speculative" else 1  # forwards of one engine step
    assert [one.latency_steps for one in found] == [steps] * 4
    assert all(one.latency_ms > 0 for one in found)
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0
    assert rig.canary.health.faults == {}
    assert rig.canary.verdict()[0] is not State.VIOLATED


def test_an_idle_engine_in_mode_raise_drills_without_raising(make_rig, link):
    rig = make_rig(link=link, drill_enabled=True, mode="raise")
    send_drill(link, "d")
    for _ in range(4):
        rig.engine.idle()
    (found,) = reports(link)
    assert (found.outcome, found.latency_steps) == (DrillOutcome.DETECTED, 0)


def test_detach_gives_the_scratch_slot_back(link):
    engine = Engine(settings.tiny())
    allocator, pool = engine.scheduler.allocator, engine.runner.pool.kv
    free, bytes_before = allocator.free_pages, pool.clone()
    canary = install_canary(engine, CanaryConfig(drill_enabled=True, endpoint="inproc"), link=link)
    canary.mark_ready()
    assert allocator.free_pages == free - 1
    send_drill(link, "d")
    engine.idle()
    canary.detach()
    assert allocator.free_pages == free
    assert torch.equal(pool, bytes_before)


def test_a_broken_comparison_is_a_missed_drill(make_rig, link, monkeypatch):
    rig = make_rig(link=link, drill_enabled=True)
    monkeypatch.setattr(drill, "compare_slots", lambda *arguments: None)
    send_drill(link, "d")
    rig.run(6)
    (found,) = reports(link)
    assert (found.outcome, found.error) == (DrillOutcome.MISSED, "the check found no violation")


def test_a_false_alarm_is_a_missed_drill(make_rig, link, monkeypatch):
    rig = make_rig(link=link, drill_enabled=True)
    complete = drill.complete_slots

    def wrongly(backend, buffers, plan, slots):
        complete(backend, buffers, plan, slots)
        buffers.records[slots, 2:] += 1

    monkeypatch.setattr(drill, "complete_slots", wrongly)
    send_drill(link, "d")
    rig.run(6)
    (found,) = reports(link)
    assert (found.outcome, found.error) == (
        DrillOutcome.MISSED,
        "a check failed before the fault was injected",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "set KV_CANARY_DRILL_ENABLED=true"),
        ({"drill_enabled": True, "real_data": "none", "coverage_target": 0.0}, "KV_CANARY_REAL_DATA"),
    ],
)
def test_a_refused_drill_names_the_reason(make_rig, link, changes, message):
    rig = make_rig(link=link, **changes)
    send_drill(link, "d")
    rig.run(3)
    (found,) = reports(link)
    assert found.outcome is DrillOutcome.REFUSED
    assert message in found.error


def test_drills_run_one_at_a_time(make_rig, link):
    rig = make_rig(link=link, drill_enabled=True)
    send_drill(link, "first")
    send_drill(link, "second")
    rig.run(6)
    assert [(one.id, one.outcome) for one in reports(link)] == [
        ("second", DrillOutcome.REFUSED),
        ("first", DrillOutcome.DETECTED),
    ]


def test_a_full_pool_has_no_scratch_slot(link):
    engine = Engine(settings.tiny())
    allocator = engine.scheduler.allocator
    allocator.allocate(allocator.free_pages)
    canary = install_canary(engine, CanaryConfig(drill_enabled=True, endpoint="inproc"), link=link)
    canary.mark_ready()
    send_drill(link, "d")
    engine.idle()
    (found,) = reports(link)
    assert (found.outcome, "no page of the pool is free" in found.error) == (DrillOutcome.REFUSED, True)
    canary.detach()
