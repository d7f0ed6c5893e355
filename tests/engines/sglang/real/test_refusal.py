"""What cannot be protected serves all the same, and says why it is not: in the log and to the service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from canary_obs.engines.sglang import limits, plugin, scheduler_canary, versions
from canary_obs.engines.sglang.scheduler_canary import canary_of
from canary_obs.vocabulary import State
from tests.engines.sglang.real.refused import assert_told, web_service
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts


@pytest.fixture
def reason(
    make_rig: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Why a scheduler with these settings is refused; it serves."""
    log = logging.getLogger("canary_obs")
    monkeypatch.setattr(log, "handlers", [caplog.handler])  # SGLang takes away those of the root

    def find(**settings: Any) -> str:
        rig = make_rig(**settings)
        given = canary_of(rig.scheduler)
        assert given is not None
        assert given.runtime is None
        assert given.refusal is not None
        assert f"this engine is not protected: {given.refusal.reason}" in caplog.text
        assert len(rig.generate(prompts(2), 4)) == 2
        return str(given.refusal.reason)

    return find


def test_a_method_with_other_parameters(reason: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.HOOKS, versions.SCHEDULER, {"run_batch": ("batch", "more")})
    assert "run_batch has parameters" in reason()


@pytest.mark.parametrize("name", ["enable_streaming_session", "enable_session_radix_cache"])
def test_settings_that_are_not_covered(reason: Any, name: str) -> None:
    assert reason(**{name: True}).startswith(f"SGLang with {name}=True is not covered yet")


@pytest.mark.parametrize("what", [what for what in limits._CLASSES if what != "KV pool"])
def test_memory_of_an_unknown_class(reason: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits._CLASSES, what, ("AnotherClass",))
    assert f"SGLang with {what} " in reason()


def test_a_scheduler_that_the_hook_missed(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook on its event loop reports that."""
    monkeypatch.setattr(plugin, "_attach", lambda *_: None)
    rig = make_rig()
    assert canary_of(rig.scheduler) is None
    monkeypatch.undo()
    monkeypatch.setenv("KV_CANARY_MODE", "log")
    vars(rig.scheduler).pop(plugin._SERVER)
    rig.generate(prompts(2), 4)
    given = canary_of(rig.scheduler)
    assert given is not None
    assert given.refusal is not None
    assert given.refusal.reason.startswith("SGLang did not run the hook on Scheduler.__init__")


def fail(*_: object) -> None:
    raise RuntimeError("made up")


def test_a_hook_that_fails_does_not_end_the_engine(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_canary, "attach_to_scheduler", fail)
    assert len(make_rig().generate(prompts(2), 4)) == 2


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, str]]:
    """The service's endpoint and address."""
    with web_service() as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("version", "SGLang 0.5.23: supported are 0.5.22"),
        ("pool class", "SGLang with KV pool MHATokenToKVPool is not covered yet"),
        ("hook", "SGLang did not apply the hooks on sglang.srt.managers.scheduler.Scheduler.gone"),
        ("attachment", "made up"),
    ],
)
def test_log_api_and_metric_say_why(
    reason: Any, service: tuple[str, str], monkeypatch: pytest.MonkeyPatch, kind: str, named: str
) -> None:
    """That it serves, and that the log has the reason, `reason` asserts. SGLang only logs a hook it lacks."""
    endpoint, address = service
    monkeypatch.setenv("KV_CANARY_ENDPOINT", endpoint)
    if kind == "version":
        monkeypatch.setattr(versions, "VERSIONS", ("0.5.22",))
    elif kind == "hook":
        monkeypatch.setitem(plugin.HOOKS, f"{plugin._SCHEDULER}.gone", plugin.attach_after_init)
    elif kind == "attachment":
        monkeypatch.setattr(scheduler_canary, "attach_adapter", fail)
    else:
        monkeypatch.setitem(limits._CLASSES, "KV pool", ("AnotherPool",))
    assert named in reason()

    assert_told(address, named)


# What is attached, and does not check -------------------------------------------------------------------


def states(rig: Rig) -> tuple[State, str]:
    state, reasons = rig.canary.verdict()
    return state, "; ".join(reasons)


def test_a_forward_mode_that_is_not_covered(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from canary_obs.engines.sglang import batch_views

    monkeypatch.setattr(batch_views, "EXTENDING", frozenset({"MIXED"}))
    rig = make_rig()
    assert len(rig.generate(prompts(2), 4)) == 2
    state, text = states(rig)
    assert state is State.BLIND
    assert "step_view" in text
    assert "forwards were not shown or not checked" in text


def test_a_forward_that_the_hook_does_not_see(make_rig: Any) -> None:
    rig = make_rig()
    rig.generate(prompts(2), 4)
    assert states(rig)[0] is State.OK
    del rig.runner.forward
    rig.generate(prompts(2, seed=1), 4)
    state, text = states(rig)
    assert state is State.BLIND
    assert "forwards were not shown or not checked" in text


def test_batches_that_the_hook_does_not_see(make_rig: Any) -> None:
    """Their requests are unknown then, and so is what their slots should hold."""
    rig = make_rig()
    rig.generate(prompts(2), 4)
    del rig.scheduler.run_batch
    rig.generate(prompts(2, seed=1), 4)
    state, text = states(rig)
    assert state is State.BLIND
    assert "the observer failed: step_view" in text


def test_a_walk_that_leaves_slots_out(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.rust_tree_core import adapter

    rig = make_rig()
    rig.generate(prompts(3))
    whole = adapter.RustUnifiedTreeCore.walk_for_kv_canary

    def half(self: Any, **kwargs: Any) -> Any:
        found = whole(self, **kwargs)
        kept = found.slot_indices.shape[0] // 2
        return type(found)(
            slot_indices=found.slot_indices[:kept],
            positions=found.positions[:kept],
            prev_slot_indices=found.prev_slot_indices[:kept],
        )

    monkeypatch.setattr(adapter.RustUnifiedTreeCore, "walk_for_kv_canary", half)
    rig.settle()
    state, text = states(rig)
    assert state is State.DEGRADED
    assert "different slots in the prefix cache, the engine counts" in text


def test_a_cache_that_takes_too_long_to_walk(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_IDLE_SWEEP_SECONDS", "0.01")
    rig = make_rig()
    rig.generate(prompts(3))
    rig.adapter.prefix_cache._seconds_per_slot.extend((1.0, 1.0))
    rig.idle_until(lambda: states(rig)[0] is State.DEGRADED)
    assert "would hold up the scheduler" in states(rig)[1]
