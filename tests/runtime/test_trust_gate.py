"""Each input of `ok` is broken in a real engine: /metrics must leave `ok`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import Pause
from canary_obs.runtime import forward, health
from canary_obs.runtime.device import delayed_device_host
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import State
from tests.links import OneThreadLink
from tests.service.fakes import violation
from tests.unchecked import Report

PATIENCE = 20.0


@dataclass(slots=True)
class TrustGate:
    """A real engine, its hub, and the scraped state."""

    rig: object
    link: LocalLink
    hub: Hub
    exposition: Exposition
    skew: list[float]
    way: str  # what the test takes away, in words
    report: Report

    def step(self) -> None:
        self.rig.run(1)
        while (message := self.link.next_message(0.0)) is not None:
            self.hub.ingest(message, self.link.send_command)
        self.hub.tick()

    def state(self) -> str:
        page, _ = self.exposition.page("")
        lines = [line for line in page.decode().splitlines() if line.startswith("kv_canary_state{")]
        (current,) = [line for line in lines if line.endswith(" 1.0")]
        return current.split('state="')[1].split('"')[0]

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, self.hub.verdict()
            self.step()

    def cached(self) -> torch.Tensor:
        self.rig.run(80)
        self.rig.finish_requests()
        slots = self.rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots
        assert slots.numel() > 20
        return slots

    def sweep(self) -> None:
        self.rig.canary.check_everything()


@pytest.fixture
def make_gate(make_rig, request, unchecked):
    way = request.node.originalname.removeprefix("test_").replace("_", " ")

    def make(**changes: object) -> TrustGate:
        link, skew = OneThreadLink(capacity=1 << 16), [0.0]
        settings = {"snapshot_seconds": 1e-6, "patrol_budget": "50%"} | changes
        rig = make_rig(link=link, **settings)
        hub = Hub(ServiceConfig(snapshot_stale_seconds=5.0), clock=lambda: time.monotonic() + skew[0])
        gate = TrustGate(rig, link, hub, Exposition(HubCollector(hub)), skew, way, unchecked)
        gate.rig.canary.reporter.send_hello()
        gate.until(lambda: bool(hub.ranks()))
        return gate

    return make


def leaves(gate: TrustGate, state: State, reason: str) -> None:
    # Until its first snapshot a rank is degraded for want of one.
    started = time.monotonic()
    gate.until(lambda: gate.state() == state.value and any(reason in one for one in gate.hub.verdict()[1]))
    verdict = gate.hub.verdict()
    assert verdict[0] is state
    gate.report(gate.way, "reference", verdict, names=reason, seconds=time.monotonic() - started)


def test_kernels_that_do_not_run(make_gate, monkeypatch) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(forward, "verify_rows", lambda *arguments: None)
    leaves(gate, State.BLIND, "kernel of group 0 are missing")
    page = gate.exposition.page("")[0].decode()
    unhealthy = [line for line in page.splitlines() if "kernel_healthy{" in line and line.endswith(" 0.0")]
    assert {line.split('phase="')[1].split('"')[0] for line in unhealthy} <= {"head", "tail"}
    assert unhealthy


def test_copies_of_the_counters_that_are_never_started(make_gate, monkeypatch) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(gate.rig.canary.counter_reader, "push", lambda *arguments: None)
    leaves(gate, State.BLIND, "the newest counters from the device are")


def test_coverage_of_the_bytes(make_gate) -> None:
    assert_ok = make_gate()
    assert_ok.until(lambda: assert_ok.state() == "ok")
    leaves(make_gate(real_data="partial"), State.DEGRADED, "of KV bytes protected, target 99.0%")


def test_coverage_of_the_sweep(make_gate) -> None:
    gate = make_gate(idle_sweep=False)
    gate.cached()
    gate.sweep()
    gate.until(lambda: gate.state() == "ok")
    slots = gate.cached()
    gate.rig.canary.awaited("full", slots[: slots.numel() // 2])
    gate.sweep()
    leaves(gate, State.DEGRADED, "the last sweep could check")


def test_sweeps_that_stop(make_gate, monkeypatch) -> None:
    gate = make_gate(sweep_interval=5, sweep_max_age_seconds=1.0, idle_sweep=False)
    gate.sweep()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(gate.rig.canary.sweeper, "begin_automatic", lambda *arguments: None)
    leaves(gate, State.DEGRADED, "last completed sweep")


def test_a_patrol_that_stops(make_gate, monkeypatch) -> None:
    gate = make_gate(patrol_max_cycle_seconds=2.0)
    gate.rig.canary.patrol.whole_cycle()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(gate.rig.canary.patrol, "advance", lambda *arguments, **named: None)
    leaves(gate, State.DEGRADED, "oldest byte check")


def test_messages_that_are_dropped(make_gate) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    capacity, gate.link._capacity = gate.link._capacity, 0
    gate.rig.run(20)
    gate.link._capacity = capacity
    leaves(gate, State.DEGRADED, "messages dropped")


def test_violation_rows_that_are_dropped(make_gate) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    capacity, gate.link._capacity = gate.link._capacity, 0
    gate.rig.canary.reporter.send_violations([violation()] * 1100)
    gate.link._capacity = capacity
    leaves(gate, State.DEGRADED, "76 violation rows dropped")


def test_snapshots_that_stop(make_gate) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    gate.skew[0] = 6.0
    assert gate.state() == "blind"
    assert any("latest snapshot is 6." in reason for reason in gate.hub.verdict()[1])


def test_counters_that_do_not_reach_the_host(make_gate, monkeypatch) -> None:
    monkeypatch.setattr(health, "PIPELINE_STALE_SECONDS", 0.3)
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(delayed_device_host.CompletedEvent, "query", lambda self: False)
    leaves(gate, State.BLIND, "counters are")


def test_a_service_that_is_silent(make_gate, monkeypatch) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(gate.link, "peer_age_seconds", lambda now: 6.0)
    leaves(gate, State.DEGRADED, "no message from the service")


def test_a_pause(make_gate) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    gate.link.send_command(Pause())
    leaves(gate, State.DEGRADED, "paused")


def test_an_observer_that_fails(make_gate) -> None:
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    gate.rig.canary.fault("step_view", RuntimeError("injected"))
    leaves(gate, State.BLIND, "the observer failed: step_view 1")


def test_damage(make_gate) -> None:
    gate = make_gate(reuse_data=False)
    gate.until(lambda: gate.state() == "ok")
    kv = gate.rig.canary.state.groups[0].view.sources[0].tensor
    slots = gate.cached()
    kv[slots] = torch.zeros_like(kv[slots])
    gate.sweep()
    leaves(gate, State.VIOLATED, "violations not acknowledged")


def test_a_forward_that_is_never_closed(make_gate, monkeypatch) -> None:
    """Later forwards would be taken for its own, and none of them would be checked."""
    gate = make_gate()
    gate.until(lambda: gate.state() == "ok")
    canary = gate.rig.canary
    with monkeypatch.context() as patch:
        patch.setattr(canary, "after_forward", lambda view: None)
        gate.step()
    leaves(gate, State.BLIND, "unclosed_forward 1")
    assert canary._depth == 0
    before = canary.counter_reader.counters.sum()
    gate.rig.run(60)
    assert canary.counter_reader.counters.sum() > before  # later forwards are checked again
    canary.check_everything()
    assert canary.counter_reader.violations == 0  # and nothing is accused
    assert canary.health.faults == {"unclosed_forward": 1}


def test_a_sweep_that_stays_running(make_gate, monkeypatch) -> None:
    gate = make_gate(sweep_max_age_seconds=1.0, idle_sweep=False)
    gate.sweep()
    gate.until(lambda: gate.state() == "ok")
    monkeypatch.setattr(gate.rig.canary.sweeper, "advance", lambda *arguments: None)
    leaves(gate, State.DEGRADED, "last completed sweep")
