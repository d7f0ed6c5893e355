"""The order of checks on a GPU, on the CPU: most of them are launched after the forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engine_api.views import StepView
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import PerturbMode, Phase, Reason, State
from tests.engines.reference.test_adapter import Recorder
from tests.reference_engine.workloads import drive
from tests.sizes import sized

# Modes of perturbation that share a run.
RUNS = sized({mode.value: [mode] for mode in PerturbMode}, {"all": list(PerturbMode)})


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a side stream."""
    monkeypatch.setattr(SideStream, "enabled", property(lambda _: True))


@pytest.fixture
def engine() -> Engine:
    return Engine(settings.tiny(seed=3))


@pytest.fixture
def canary(engine: Engine) -> Iterator[CanaryRuntime]:
    built = protect(engine)
    yield built
    built.detach()


def protect(engine: Engine, **changes: object) -> CanaryRuntime:
    built = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, **changes))  # type: ignore[arg-type]
    assert built is not None
    built.mark_ready()
    return built


class RecordingRunner(Runner):
    calls: list[str]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.calls.append("forward")
        return super().forward(batch)


class SideStreamRecorder(Recorder):
    def before_write(self, step: StepView) -> None:
        self.note("before_write", step)

    def forward_launched(self, step: StepView) -> None:
        self.note("forward_launched", step)

    def note(self, hook: str, step: StepView) -> None:
        self.calls.append(f"{hook}, oracle {step.digests is not None and step.expected_ids is not None}")


def test_only_the_comparison_of_old_bytes_precedes_the_forward(engine: Engine) -> None:
    recorder = SideStreamRecorder()
    engine.runner.__class__, engine.runner.calls = RecordingRunner, recorder.calls
    adapter = ReferenceAdapter(engine)
    adapter.attach(recorder)
    drive(engine, 3, 1)
    adapter.detach()
    one = ["before_write, oracle False", "forward", "forward_launched, oracle True", "after", "step"]
    assert recorder.calls == one * 3
    assert "forward" not in vars(engine.runner)


def test_clean_traffic_has_no_violation_and_everything_is_checked(engine: Engine) -> None:
    canary = protect(engine, sweep_interval=25, prefix_data=True, verify_on_hit=True)
    drive(engine, 200, 1)
    canary.check_everything()
    final = canary.detach()
    counters = final.groups["full"]
    assert (final.state, final.state_reasons) == (State.OK, ())
    assert counters.runs[Phase.HEAD] == counters.runs[Phase.TAIL] == final.step == 200
    assert counters.written == counters.completed == engine.statistics.tokens
    assert sum(counters.unverified.values()) == 0
    assert all(counters.verified[phase] > 0 for phase in (Phase.HEAD, Phase.TAIL, Phase.SWEEP))
    assert all(counters.hashed[phase] > 0 for phase in Phase)


@pytest.mark.parametrize("model", ["swa", "compressed", "host_tier", *sized(["mla_sparse", "fp8"], [])])
def test_every_kind_of_pool_is_clean(model: str) -> None:
    engine = Engine(settings.with_model(settings.tiny(seed=3), model))
    canary = protect(engine)
    drive(engine, 120, 1)
    canary.check_everything()
    assert canary.verdict() == (State.OK, ())
    canary.detach()


@pytest.mark.parametrize("modes", RUNS.values(), ids=RUNS)
def test_every_injection_is_accounted_for(engine: Engine, modes: list[PerturbMode]) -> None:
    canary = protect(
        engine, perturb=",".join(f"{mode}=0.2" for mode in modes), perturb_enabled=True, perturb_seed=7,
        patrol_budget="50%", sweep_interval=40,
    )  # fmt: skip
    drive(engine, sized(250, 150), 1)
    canary.check_everything()
    assert canary.injector is not None
    for mode in modes:
        tally = canary.injector.injections.summary()[mode]
        assert tally["injected"] > sized(10, 6), mode
        assert tally["detected"] > 0.5 * tally["injected"], mode
        assert tally["detected"] + tally["masked"] == tally["injected"], mode
    canary.detach()


def test_damage_in_a_slot_about_to_be_overwritten_is_seen(engine: Engine) -> None:
    canary = protect(engine, patrol_budget="off", idle_sweep=False)
    runner, flipped = engine.runner, []
    prepare = runner.prepare

    def damaged(plan: object) -> ForwardBatch:
        batch = prepare(plan)
        records = canary.state.groups[0].buffers.records
        # State 2 is COMPLETE: a slot used before, whose bytes are known.
        complete = [slot for slot in batch.out_slots.tolist() if int(records[slot, 0]) >> 32 & 3 == 2]
        if complete and not flipped:
            flipped.append(complete[0])
            locate_byte(canary.state.groups[0].view.sources[0], complete[0], 5).flip(1)
        return batch

    vars(runner)["prepare"] = damaged
    drive(engine, 300, 1)
    del vars(runner)["prepare"]
    violations = canary.detach().groups["full"].violations
    assert flipped
    assert violations[Phase.HEAD][Reason.KV_DATA] == 1
    assert sum(sum(by_reason.values()) for by_reason in violations.values()) == 1


def test_a_forward_that_raises_ends_its_step(engine: Engine, canary: CanaryRuntime) -> None:
    drive(engine, 20, 1)
    runner, inner = engine.runner, engine.runner.pool.write

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    vars(runner.pool)["write"] = fail
    engine.add_request(torch.arange(3, 40, dtype=torch.int32).numpy(), Sampling(max_tokens=4))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    vars(runner.pool)["write"] = inner
    drive(engine, 100, 2)
    canary.check_everything()
    assert canary.counter_reader.violations == 0
    assert canary.health.faults.total() == 0


def test_a_view_that_cannot_be_completed_is_a_fault_and_no_violation(
    engine: Engine, canary: CanaryRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(engine, 20, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("no digests")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixDigests, "advance", fail)
        drive(engine, 5, 2)
    drive(engine, 100, 3)
    canary.check_everything()
    assert canary.health.faults == {"step_view": 5}
    assert canary.verdict()[0] is State.BLIND
    assert canary.counter_reader.violations == 0


def test_a_forward_within_a_forward_is_not_taken_for_a_step(engine: Engine, canary: CanaryRuntime) -> None:
    runner, inner = engine.runner, engine.runner.pool.write
    observed, batches, nested = runner.forward, [], []

    def within(*given: object) -> None:
        if batches and not nested:
            nested.append(canary.step)
            observed(batches[0])
        inner(*given)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        batches[:] = [batch]
        return observed(batch)

    vars(runner)["forward"], vars(runner.pool)["write"] = forward, within
    drive(engine, 40, 1)
    vars(runner)["forward"] = observed
    del vars(runner.pool)["write"]
    canary.check_everything()
    assert nested
    assert canary.step == 40
    assert canary.verdict() == (State.OK, ())
