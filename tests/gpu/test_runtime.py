"""The runtime on a GPU: clean, complete, and without a wait or an allocation of its own."""

from __future__ import annotations

import time

import pytest
import torch
import triton

from canary_kernels import layout
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.graph import DecodeGraphs
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.runtime import step_scheduler
from canary_obs.vocabulary import PerturbMode, Phase, State
from tests.gpu.rig import HOOKS, make_rig, refuse_waits
from tests.reference_engine.workloads import drive


@pytest.mark.parametrize("page_size", [1, 16])
def test_clean_traffic_has_no_violation_and_everything_is_checked(page_size: int) -> None:
    rig = make_rig(sweep_interval=25, patrol_budget="1GB/s", engine={"page_size": page_size})
    rig.run(600)
    rig.canary.check_everything()
    final = rig.canary.detach()
    counters = final.groups["full"]
    assert (final.state, final.state_reasons) == (State.OK, ())
    assert counters.runs[Phase.HEAD] == counters.runs[Phase.TAIL] == final.step
    assert counters.written == counters.completed == rig.engine.statistics.tokens
    assert all(counters.hashed[phase] > 0 for phase in (Phase.HEAD, Phase.SWEEP, Phase.PATROL))
    assert sum(final.sweep_passes.values()) >= 5
    assert rig.engine.statistics.evictions > 0


@pytest.mark.parametrize("mode", [mode.value for mode in PerturbMode])
def test_every_injection_is_accounted_for(mode: str) -> None:
    rig = make_rig(
        perturb=f"{mode}=0.2", perturb_enabled=True, perturb_seed=7, patrol_budget="1GB/s", sweep_interval=40
    )
    rig.run(500)
    rig.canary.check_everything()
    tally = rig.canary.injector.injections.summary()[mode]
    assert tally["injected"] > 25
    assert tally["detected"] > 0.8 * tally["injected"]
    assert tally["detected"] + tally["masked"] == tally["injected"]


def test_no_hook_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(sweep_interval=10, patrol_budget="1GB/s")
    rig.run(20)
    calls = refuse_waits(rig.canary, monkeypatch)

    def refuse(*_: object) -> None:
        raise AssertionError("the canary synchronised")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", refuse)
    rig.run(300)
    monkeypatch.undo()
    assert min(calls.values()) >= 300
    assert rig.canary.health.faults.total() == 0
    assert sum(rig.canary.sweeper.passes.values()) > 5
    assert rig.canary.patrol.cycles > 0
    rig.canary.detach()


def test_announcements_do_not_synchronise() -> None:
    rig = make_rig()
    rig.run(30)
    slots = torch.tensor([3, -1, 5], device="cuda")
    others = torch.tensor([7, -1, 9], device="cuda")
    group = rig.canary.state.groups[0]
    kept = group.buffers.records[slots[::2]].clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rig.canary.copied("full", slots, others)
        rig.canary.received("full", slots)
        rig.canary.invalidated("full", slots[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    records = group.buffers.records.cpu()
    assert torch.equal(records[[7, 9]], kept.cpu())
    assert int(records[3, layout.IDENTITY]) >> 32 & layout.STATE_MASK == layout.RecordState.BASELINE
    assert not records[5].any()
    assert rig.canary.health.faults.total() == 0
    rig.canary.detach()


def test_hooks_do_not_allocate_from_the_driver() -> None:
    rig = make_rig(sweep_interval=25, patrol_budget="1GB/s")
    rig.run(150)
    allocated = [0, 0]  # within the hooks: the engine itself may need a new page for its own uploads

    def counts() -> tuple[int, int]:
        device = torch.cuda.memory_stats()["num_device_alloc"]
        return device, torch.cuda.host_memory_stats()["num_host_alloc"]

    for name in HOOKS:
        hook = getattr(rig.canary, name)

        def counted(*arguments: object, hook=hook) -> None:
            before = counts()
            hook(*arguments)
            for kind, (earlier, now) in enumerate(zip(before, counts(), strict=True)):
                allocated[kind] += now - earlier

        setattr(rig.canary, name, counted)
    rig.run(300)
    assert allocated == [0, 0]
    rig.canary.detach()


def test_every_kernel_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts))
    rig = make_rig(sweep_interval=5, patrol_budget="1GB/s")
    slowest = 0.0
    for name in HOOKS:
        hook = getattr(rig.canary, name)

        def timed(*arguments: object, hook=hook) -> None:
            nonlocal slowest
            started = time.thread_time()  # a busy host may stop any thread for as long
            hook(*arguments)
            slowest = max(slowest, time.thread_time() - started)

        setattr(rig.canary, name, timed)
    rig.run(100)
    # Compiling one kernel takes some 300 ms.
    assert slowest < 0.1
    assert compiled == []  # nor was what attaching compiled seen by an engine that monitors compilations
    rig.canary.detach()


def test_after_step_returns_at_once_while_the_gpu_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_scheduler, "_SECONDS_BETWEEN_TASKS", 0.0)  # these steps are short
    rig = make_rig(patrol_budget="off")
    rig.run(50)
    counter_reader, skipped = rig.canary.counter_reader, rig.canary.counter_reader._counters.skipped
    times = []
    for step in range(480):  # without forwards every twelfth starts a copy, and there is room for 16
        torch.cuda._sleep(20_000_000)  # some 10 ms each
        started = time.perf_counter()
        rig.canary.after_step()
        times.append(time.perf_counter() - started)
        assert step < 205 or counter_reader._counters.full
    assert sum(times) < 0.1
    assert counter_reader._counters.skipped - skipped > 20
    torch.cuda.synchronize()
    for _ in range(24):
        rig.canary.after_step()
    assert rig.canary.verdict() == (State.OK, ())
    rig.canary.detach()


def test_the_captured_graph_answers_like_the_plain_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = DecodeGraphs.replay
    monkeypatch.setattr(
        DecodeGraphs, "replay", lambda self, batch: replays.append(batch) or replay(self, batch)
    )
    engine = Engine(settings.demo(seed=4, device="cuda"))
    largest = 0.0
    forward = Runner.forward.__get__(engine.runner)

    def both(batch: object) -> torch.Tensor:
        nonlocal largest
        logits = forward(batch).clone()
        graphs, engine.runner._graphs = engine.runner._graphs, None
        plain = forward(batch)
        engine.runner._graphs = graphs
        largest = max(largest, float((logits - plain).abs().max()))
        return logits

    vars(engine.runner)["forward"] = both
    drive(engine, 200, 5)
    assert len({len(batch.extends) for batch in replays}) > 3
    assert largest < 1e-3
