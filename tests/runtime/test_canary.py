"""The runtime in a real engine: no false alarm, and unchanged outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.toolkit import attachment
from canary_obs.errors import UnsupportedEngine
from canary_obs.records import Acknowledge, Hello, Pause, Ping, Resume
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import Mode, Phase, State
from tests.late_copies import late_copies
from tests.links import OneThreadLink
from tests.sizes import sized

STEPS = 250


def outputs_of(prepare: Callable[[Engine], object], seed: int = 5) -> list[tuple[str, tuple[int, ...]]]:
    """Everything a loaded engine answers in STEPS steps."""
    engine = Engine(settings.tiny(seed=seed))
    prepare(engine)
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), seed)
    answers = []
    for _ in range(STEPS):
        traffic.advance(engine)
        if engine.has_work():
            answers += [
                (request.id, tuple(int(token) for token in request.output)) for request in engine.step()
            ]
    assert len(answers) > 20
    return answers


def protect(engine: Engine, **changes: object) -> CanaryRuntime:
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, sweep_interval=20, **changes))  # type: ignore[arg-type]
    assert canary is not None
    canary.mark_ready()
    return canary


@pytest.mark.parametrize("page_size", sized([1, 16], [16]))
def test_clean_traffic_has_no_violation_and_everything_is_checked(make_rig, page_size: int) -> None:
    rig = make_rig(sweep_interval=25, prefix_data=True, verify_on_hit=True, engine={"page_size": page_size})
    rig.run(sized(600, 300))
    rig.finish_requests()
    rig.canary.check_everything()
    final = rig.canary.detach()
    counters = final.groups["full"]
    assert (final.state, final.state_reasons) == (State.OK, ())
    assert sum(final.sweep_passes.values()) >= 5
    assert final.sweep is not None
    assert final.sweep.checked == final.sweep.total > 0
    assert counters.runs[Phase.HEAD] == counters.runs[Phase.TAIL] == final.step
    assert counters.written == counters.completed == rig.engine.statistics.tokens
    assert sum(counters.unverified.values()) == 0
    assert all(counters.verified[phase] > 0 for phase in (Phase.HEAD, Phase.TAIL, Phase.SWEEP))
    assert all(counters.hashed[phase] > 0 for phase in Phase)
    assert rig.engine.statistics.evictions > 0


def test_outputs_are_identical_with_and_without_the_canary() -> None:
    assert outputs_of(protect) == outputs_of(lambda engine: None)


def test_detach_restores_the_engine_exactly() -> None:
    engine = Engine(settings.tiny())
    before = dict(vars(engine)), dict(vars(engine.runner))
    canary = protect(engine)
    assert vars(engine).keys() != before[0].keys()
    canary.detach()
    assert (dict(vars(engine)), dict(vars(engine.runner))) == before
    canary.detach()


def test_mode_none_touches_nothing() -> None:
    engine = Engine(settings.tiny())
    assert install_canary(engine, CanaryConfig(mode=Mode.NONE)) is None
    assert "step" not in vars(engine)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="no adapter"):
        install_canary(object(), CanaryConfig(endpoint=IN_PROCESS))


def test_a_thread_that_launches_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no GPU here: both devices are simulated.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for fitting in ("cpu", "cuda:0"):
        attachment.check_current_device(torch.device(fitting))
    monkeypatch.setattr(attachment, "device_of", lambda _: torch.device("cuda:1"))
    engine = Engine(settings.tiny())
    with pytest.raises(
        UnsupportedEngine, match=r"is on cuda:1.* is cuda:0.*call torch\.cuda\.set_device\(1\)"
    ):
        install_canary(engine, CanaryConfig(endpoint=IN_PROCESS))
    assert "step" not in vars(engine)


def test_slots_written_before_attach_are_unverified() -> None:
    engine = Engine(settings.tiny())
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 1)
    for _ in range(60):
        traffic.advance(engine)
        engine.step()
    canary = protect(engine)
    for _ in range(60):
        traffic.advance(engine)
        engine.step()
    canary.check_everything()
    final = canary.detach()
    assert canary.counter_reader.violations == 0
    assert sum(final.groups["full"].unverified.values()) > 0


def test_nothing_is_checked_before_mark_ready() -> None:
    engine = Engine(settings.tiny())
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 1)
    for _ in range(30):
        traffic.advance(engine)
        engine.step()
    assert canary.step == 0
    assert canary.verdict()[0] is State.OFF
    canary.detach()


def test_requests_that_were_not_shown_before_it_is_ready_are_not_followed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(settings.tiny())
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    asked: list[tuple[str, bool]] = []
    for name in ("show_requests", "requests_running"):
        method = getattr(canary._adapter, name)

        def noted(name: str = name, method: Callable[[], object] = method) -> object:
            asked.append((name, canary.run.armed))
            return method()

        monkeypatch.setattr(canary._adapter, name, noted)
    canary.mark_ready()
    assert asked == [("show_requests", False), ("requests_running", False)]
    canary.detach()


def test_a_nested_forward_is_not_taken_for_a_step(make_rig) -> None:
    rig = make_rig()
    runner, inner = rig.engine.runner, rig.engine.runner.pool.write
    observed = runner.forward
    nested: list[int] = []

    def forward_within(layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        # What a draft worker does: a forward of its own inside the target's.
        if not nested:
            nested.append(rig.canary.step)
            observed(current[0])
        inner(layer, slots, key, value)

    current: list[object] = []

    def forward(batch: object) -> torch.Tensor:
        current[:] = [batch]
        return observed(batch)

    vars(runner)["forward"] = forward
    vars(runner.pool)["write"] = forward_within
    rig.run(40)
    vars(runner)["forward"] = observed
    del vars(runner.pool)["write"]
    rig.canary.check_everything()
    assert nested
    assert rig.canary.counter_reader.violations == 0
    assert rig.canary.step == rig.engine.statistics.steps


def test_a_failed_forward_leaves_its_slots_unverified(make_rig) -> None:
    rig = make_rig()
    rig.run(30)
    write = rig.engine.runner.pool.write

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    vars(rig.engine.runner.pool)["write"] = fail
    rig.traffic.advance(rig.engine)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.engine.step()
    del vars(rig.engine.runner.pool)["write"]
    assert rig.engine.runner.pool.write == write
    rig.run(30)
    assert rig.canary.counter_reader.violations == 0


def test_commands_pause_resume_acknowledge_and_hello(make_rig) -> None:
    link = OneThreadLink()
    rig = make_rig(link=link, sweep_interval=5, snapshot_seconds=1e-6)
    rig.run(20)
    passes = sum(rig.canary.sweeper.passes.values())
    assert passes > 0
    link.send_command(Pause())
    rig.run(30)
    assert sum(rig.canary.sweeper.passes.values()) <= passes + 1
    assert rig.canary.verdict() == (State.DEGRADED, ("sweeps and patrol are paused",))
    link.send_command(Resume())
    rig.run(30)
    assert rig.canary.verdict()[0] is State.OK
    rig.canary.fault("test", RuntimeError("injected"))
    assert rig.canary.verdict()[0] is State.BLIND
    link.send_command(Acknowledge())
    link.send_command(Ping(want_hello=True))
    rig.run(3)
    assert rig.canary.verdict()[0] is State.OK


def test_memory_is_32_bytes_per_slot_plus_fixed_buffers(make_rig) -> None:
    rig = make_rig()
    state = rig.canary.state
    assert state.record_bytes == 32 * rig.engine.config.num_slots
    assert f"records {state.record_bytes} B (32 B per slot)" in attachment.memory_report(rig.canary)
    assert state.fixed_bytes < 200_000


def test_records_that_the_adapter_keeps_count_as_well(make_rig) -> None:
    """Also when a service that was started later asks."""
    link = OneThreadLink()
    rig = make_rig(link=link)
    link.send_command(Ping(want_hello=True))
    rig.run(3)
    rig.canary.reporter.send_hello(640)
    rig.canary.reporter.introduce()
    found = []
    while (message := link.next_message(0.0)) is not None:
        found += [message.record_bytes] if isinstance(message, Hello) else []
    own = rig.canary.state.record_bytes
    assert set(found[:-2]) == {own}
    assert found[-2:] == [own + 640] * 2


def test_counters_on_their_way_are_no_reason_to_call_an_idle_engine_soon(make_rig, monkeypatch) -> None:
    """Each call starts the next copy: on a GPU an idle engine was called again after a millisecond."""
    rig = make_rig(idle_sweep=False)
    rig.run(5)
    late_copies(monkeypatch)
    assert [rig.canary.idle() for _ in range(5)] == [False] * 5
    reader = rig.canary.counter_reader
    assert reader.busy, "the newest copy has not arrived"
    assert reader.sample.step == rig.canary.step


def test_an_idle_engine_that_has_found_something_is_called_soon(make_rig, monkeypatch) -> None:
    """The rows of what was counted are still to be read."""
    rig = make_rig(idle_sweep=False, busy_sweep=False, patrol_budget="50%", reuse_data=False)
    rig.run(60)
    late_copies(monkeypatch)
    reader, answers = rig.canary.counter_reader, list[bool]()
    (group, *_) = rig.canary.state.groups
    slot = int(rig.canary._adapter.slots_in_use(group.name)[0])
    locate_byte(group.view.sources[0], slot, 5).flip(2)
    while not reader.log.events_read:
        answers.append(rig.canary.idle())
    assert answers[-1:] == [False]
    assert True in answers
