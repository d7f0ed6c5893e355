"""Exceptions in the observer leave the engine's outputs unchanged and end `ok`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig, ServiceConfig
from canary_obs.records import StartSweep
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime import forward, health
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device import counter_reader
from canary_obs.runtime.sweep import sweeper as sweep
from canary_obs.serve import ServiceThread
from canary_obs.transport.links import EngineLink, LocalLink
from canary_obs.transport.sender import open_link
from canary_obs.vocabulary import Mode, State
from tests.forked import Forked
from tests.links import OneThreadLink

STEPS, INJECTED_AT = 120, 50


class InjectedError(Exception):
    """The fault."""


def broken(*_: object, **__: object) -> None:
    raise InjectedError


def answers(
    inject: Callable[[CanaryRuntime], None] | None, link: EngineLink | None = None, **changes: object
) -> tuple[list, CanaryRuntime]:
    """The engine's outputs, with a fault injected in the middle of the run."""
    engine = Engine(settings.tiny(seed=8))
    link = OneThreadLink(capacity=1 << 20) if link is None else link
    config = CanaryConfig(
        endpoint=IN_PROCESS, sweep_interval=15, patrol_budget="50%", snapshot_seconds=1e-6, **changes
    )  # type: ignore[arg-type]
    canary = install_canary(engine, config, link=link)
    assert canary is not None
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 8)
    found = []
    for step in range(STEPS):
        if step == INJECTED_AT and inject is not None:
            inject(canary)
        if step == INJECTED_AT + 2 and isinstance(link, LocalLink):
            link.send_command(StartSweep(id="demanded"))
        traffic.advance(engine)
        if engine.has_work():
            found += [(r.id, tuple(int(token) for token in r.output)) for r in engine.step()]
        else:
            engine.idle()
    return found, canary


@pytest.fixture(scope="module")
def untouched() -> list:
    found, canary = answers(None)
    assert canary.verdict() == (State.OK, ())
    canary.detach()
    assert len(found) > 10
    return found


def break_module(
    module: object, name: str
) -> Callable[[pytest.MonkeyPatch], Callable[[CanaryRuntime], None]]:
    return lambda patch: lambda canary: patch.setattr(module, name, broken)


def break_part(path: str) -> Callable[[pytest.MonkeyPatch], Callable[[CanaryRuntime], None]]:
    def prepare(patch: pytest.MonkeyPatch) -> Callable[[CanaryRuntime], None]:
        def inject(canary: CanaryRuntime) -> None:
            *owners, name = path.split(".")
            owner: object = canary
            for part in owners:
                owner = getattr(owner, part)
            patch.setattr(owner, name, broken)

        return inject

    return prepare


PARTS = {
    "head: reuse check": break_module(forward, "compare_slots"),
    "head: write": break_module(forward, "write_identities"),
    "head and tail: verify": break_module(forward, "verify_rows"),
    "tail: fingerprint": break_module(forward, "complete_slots"),
    "sweep: links": break_module(sweep, "verify_list"),
    "sweep: bytes": break_module(sweep, "compare_slots"),
    "sweep: walker": break_part("_adapter.prefix_cache.cached"),
    "sweep: eviction check": break_part("_adapter.prefix_cache.still_cached"),
    "patrol": break_part("patrol._checker.submit"),
    "pipeline: push": break_part("counter_reader._counters.push"),
    "pipeline: poll": break_part("counter_reader._counters.newest"),
    "pipeline: process": break_part("health.compare_runs"),
    "counters": break_module(counter_reader, "time"),
    "mailbox: receive": break_part("reporter._link.receive"),
    "mailbox: send": break_part("reporter._link.send"),
    "adapter: digests": break_part("_adapter._digests.advance"),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_changes_no_output_and_turns_the_state_blind(
    part: str, untouched: list, monkeypatch
) -> None:
    found, canary = answers(PARTS[part](monkeypatch))
    state, reasons = canary.verdict()
    monkeypatch.undo()
    assert found == untouched
    assert state is State.BLIND, reasons
    assert canary.health.faults.total() > 0
    assert canary.counter_reader.violations == 0
    canary.detach()


def test_a_fault_whose_recovery_fails_turns_the_checks_off(untouched: list, monkeypatch) -> None:
    def inject(canary: CanaryRuntime) -> None:
        monkeypatch.setattr(forward, "write_identities", broken)
        monkeypatch.setattr(canary.checks, "abandon", broken)

    found, canary = answers(inject)
    state, reasons = canary.verdict()
    monkeypatch.undo()
    assert found == untouched
    assert state is State.BLIND
    assert any("checks are off" in reason for reason in reasons)
    assert not canary.run.armed
    canary.detach()


def test_in_mode_raise_an_observer_fault_is_raised(monkeypatch) -> None:
    with pytest.raises(InjectedError):
        answers(PARTS["head: write"](monkeypatch), mode=Mode.RAISE)


def test_dropped_messages_are_counted_and_degrade(untouched: list) -> None:
    def inject(canary: CanaryRuntime) -> None:
        canary.reporter._link._capacity = 0

    found, canary = answers(inject)
    state, reasons = canary.verdict()
    assert found == untouched
    assert state is State.DEGRADED
    assert any("messages dropped" in reason for reason in reasons)
    assert canary.reporter.dropped_messages > 0
    canary.detach()


def test_a_silent_service_degrades(make_rig, monkeypatch) -> None:
    link = OneThreadLink()
    rig = make_rig(link=link)
    rig.run(5)
    assert rig.canary.verdict()[0] is State.OK
    monkeypatch.setattr(link, "peer_age_seconds", lambda now: 6.0)
    assert rig.canary.verdict() == (State.DEGRADED, ("no message from the service at inproc for 6 s",))


def test_a_service_that_was_never_heard_may_still_be_starting(make_rig, monkeypatch) -> None:
    rig = make_rig(link=OneThreadLink())
    rig.run(5)
    reporter = rig.canary.reporter
    for seconds, state in ((10.0, State.OK), (15.1, State.DEGRADED)):
        monkeypatch.setattr(reporter, "_began", time.monotonic() - seconds)
        assert rig.canary.verdict()[0] is state
    assert "no message from the service at inproc for 15 s" in rig.canary.verdict()[1]


def test_a_killed_service_changes_no_output_and_degrades(
    untouched: list, monkeypatch, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/service.sock"
    link = open_link(CanaryConfig(endpoint=endpoint))
    with (tmp_path / "log").open("wb") as log:
        service = Forked(
            "canary_obs", "serve", "--port", "0", "--endpoint", endpoint, env=os.environ, files=[log]
        )
    monkeypatch.setattr(health, "PEER_SILENT_SECONDS", 0.5)
    deadline = time.monotonic() + 60

    def wait_for(true: Callable[[], bool]) -> None:
        while not true():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()

    def heard() -> bool:
        link.receive()
        return link.peer_age_seconds(time.monotonic()) is not None

    def inject(canary: CanaryRuntime) -> None:
        wait_for(heard)
        assert canary.verdict()[0] is State.OK
        service.kill()
        service.wait()

    try:
        found, canary = answers(inject, link=link)
        assert found == untouched
        wait_for(lambda: any("no message from the service" in reason for reason in canary.verdict()[1]))
        assert canary.verdict()[0] is State.DEGRADED
        assert canary.health.faults.total() == 0
        canary.detach()
    finally:
        service.kill()
        service.wait()


def test_a_full_disk_for_the_violation_log_changes_no_output_and_is_counted(untouched: list) -> None:
    link = LocalLink(capacity=1 << 20)
    service = ServiceThread(ServiceConfig(port=0, log_file="/dev/full"), link=link)

    def inject(canary: CanaryRuntime) -> None:
        # A record, not KV bytes: the engine must not notice.
        records = canary.state.groups[0].buffers.records
        records[:, layout.FINGERPRINT_K] += records[:, layout.FINGERPRINT_K] != 0

    try:
        found, canary = answers(inject, link=link)
        assert found == untouched
        assert canary.counter_reader.violations > 0
        deadline = time.monotonic() + 30
        while service._violation_log.dropped == 0:
            assert time.monotonic() < deadline
        assert service.hub.verdict()[0] is not State.OK
        canary.detach()
    finally:
        service.close()
