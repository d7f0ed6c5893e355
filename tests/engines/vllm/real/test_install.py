"""install_canary on a real LLM and on its model runner: attach, catch a fault, detach exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs import CanaryConfig, KVCacheViolation, Mode, UnsupportedEngine, install_canary
from canary_obs.engines.vllm import plugin
from canary_obs.records import Phase, Reason, State
from tests.engines.vllm.real.forwards import acknowledge
from tests.engines.vllm.real.rig import Rig, prompts


@pytest.fixture
def rig(models: Any) -> Iterator[Rig]:
    """An engine that no plugin has instrumented, and that has served already."""
    plugin.unregister()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KV_CANARY_MODE")
        made = Rig(models("llama"))
        made.generate(prompts(4), 4)
        yield made
        made.close()
    plugin.register()


def objects(rig: Rig) -> list[Any]:
    manager = rig.core.scheduler.kv_cache_manager
    return [rig.runner, rig.runner.model, rig.worker, rig.core.scheduler, manager, manager.block_pool]


def install(rig: Rig, engine: Any, mode: Mode = Mode.LOG) -> None:
    canary = install_canary(engine, CanaryConfig(mode=mode, endpoint="inproc", verify_on_hit=True))
    assert canary is not None
    canary.mark_ready()
    rig.collect_from(canary)


@pytest.mark.parametrize("given", ["llm", "runner"])
def test_attach_catch_a_flipped_element_and_detach(rig: Rig, given: str) -> None:
    before = [dict(vars(owner)) for owner in objects(rig)]
    old = rig.generate(prompts(4), 4)
    install(rig, rig.llm if given == "llm" else rig.runner)
    # Blocks that were cached before the canary came are used again, and unverified.
    assert rig.generate(prompts(4), 4) == old
    answers = rig.generate(prompts(6, seed=5), 8)
    assert rig.settle() == []
    assert rig.checks() > 1000
    acknowledge(rig)  # that it was attached warm
    state, reasons = rig.canary.verdict()
    if given == "llm":
        # Sweeps check what they know, and say that it is not all, until the cache is reset.
        assert state is State.DEGRADED
        (reason,) = reasons
        assert "different slots in the prefix cache, the engine counts" in reason
        assert rig.canary.sweeper.last.total > 0
    else:
        assert state is State.DEGRADED
        sweeps, hits = sorted(reasons, key=lambda reason: "prefix hits" in reason)
        assert "pass the LLM to install_canary" in sweeps
        assert "this engine does not count its prefix hits" in hits
    block = rig.idle_blocks()[-1]
    element = rig.layer_cache(0, 1)[block].view(-1)
    element[9] = -element[9]
    rig.settle()
    element[9] = -element[9]
    phases = {Phase.PATROL, Phase.SWEEP} if given == "llm" else {Phase.PATROL}
    assert set(rig.reasons()) == {(phase, Reason.KV_DATA) for phase in phases}
    assert {violation.slot // 32 for violation in rig.found} == {block}
    rig.canary.detach()
    for owner, then in zip(objects(rig), before, strict=True):
        now = vars(owner)
        assert now.keys() == then.keys()
        assert all(now[name] is then[name] for name in then if callable(then[name]))
    steps = rig.canary.step
    assert rig.generate(prompts(6, seed=5), 8) == answers
    assert rig.canary.step == steps


def test_mode_raise_ends_generate(rig: Rig) -> None:
    install(rig, rig.llm, Mode.RAISE)
    rig.generate(prompts(4, seed=5), 4)
    block = rig.idle_blocks()[-1]
    with rig.adapter.hooks.lock:
        rig.layer_cache(0, 1)[block].zero_()
        rig.canary.patrol.whole_cycle()
    with pytest.raises(KVCacheViolation, match="reason=kv_data"):
        rig.generate(prompts(4, seed=6), 8)
    rig.canary.detach()


def test_a_sleeping_engine_is_refused(rig: Rig) -> None:
    install(rig, rig.llm)
    with pytest.raises(UnsupportedEngine, match="call detach"):
        rig.llm.sleep(level=1)
    rig.canary.detach()
    rig.llm.sleep(level=1)
    rig.llm.wake_up()
    install(rig, rig.llm)
    rig.generate(prompts(2), 2)
    assert rig.settle() == []
    rig.canary.detach()


def test_what_cannot_be_attached_to(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CanaryConfig(endpoint="inproc")
    rig.start({"a": prompts(1)[0]}, 4)
    with pytest.raises(UnsupportedEngine, match="unfinished requests"):
        install_canary(rig.llm, config)
    rig.finish()
    install(rig, rig.llm)
    for engine in (rig.llm, rig.runner):
        with pytest.raises(UnsupportedEngine, match="wrapped already"):
            install_canary(engine, config)
    rig.canary.detach()
    with monkeypatch.context() as patch:
        patch.setattr(rig.core, "model_executor", object())
        with pytest.raises(UnsupportedEngine, match=r"runs its workers in other processes.*KV_CANARY_MODE"):
            install_canary(rig.llm, config)
    with monkeypatch.context() as patch:
        patch.setattr(rig.llm.llm_engine, "engine_core", object())
        with pytest.raises(UnsupportedEngine, match="MULTIPROCESSING=0 and use a single worker"):
            install_canary(rig.llm, config)
        patch.setenv("KV_CANARY_MODE", "log")
        with pytest.raises(UnsupportedEngine, match="plugin has attached a canary already"):
            install_canary(rig.llm, config)


def test_an_engine_that_the_plugin_protects(make_rig: Any) -> None:
    rig = make_rig()
    config = CanaryConfig(endpoint="inproc")
    with pytest.raises(UnsupportedEngine, match="plugin has attached a canary to this LLM already"):
        install_canary(rig.llm, config)
    with pytest.raises(UnsupportedEngine, match="KV_CANARY_MODE makes the vLLM plugin attach one"):
        install_canary(rig.runner, config)
    assert rig.generate(prompts(2), 2)
    assert rig.settle() == []
