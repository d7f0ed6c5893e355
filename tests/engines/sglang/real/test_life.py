"""From SGLang's plugins to a canary and back: what is attached, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import canary_obs
from canary_obs.config import CanaryConfig
from canary_obs.engines.sglang.plugin import HOOKS
from canary_obs.engines.sglang.scheduler_canary import canary_of, detach_from_scheduler
from canary_obs.errors import UnsupportedEngine
from canary_obs.vocabulary import State
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts, storm
from tests.engines.taken_methods import taken_before


def attributes(rig: Rig) -> dict[tuple[str, str], Any]:
    """Of every object that the adapter wraps, by object and name."""
    allocator = rig.runner.token_to_kv_pool_allocator
    owners = {"scheduler": rig.scheduler, "runner": rig.runner, "allocator": allocator}
    return {(owner, name): value for owner, thing in owners.items() for name, value in vars(thing).items()}


def test_the_plugin_attaches_and_detach_leaves_nothing(make_rig: Any) -> None:
    rig = make_rig(page_size=16)
    rig.generate(prompts(2))
    attached = attributes(rig)
    detach_from_scheduler(rig.scheduler)
    plain = attributes(rig)
    assert attached.keys() - plain.keys() == {
        ("scheduler", "kv_canary"), ("scheduler", "run_batch"), ("scheduler", "on_idle"),
        ("runner", "forward"), ("allocator", "_release_page_ids"), ("allocator", "clear"),
    }  # fmt: skip
    modules = {str(getattr(value, "__module__", "")) for value in plain.values()}
    assert not [name for name in modules if "canary_obs" in name]
    assert rig.generate({"after": [7, 8, 9, 10]}).keys() == {"after"}


@pytest.mark.parametrize("model", ["llama", "windows"])
def test_nothing_in_sglang_holds_a_method_as_it_was(make_rig: Any, model: str) -> None:
    """The tree of 0.5.16 does, on GPUs: test_freed_slots.py."""
    rig = make_rig(model)
    rig.generate(prompts(2))
    assert taken_before(rig.adapter._patches) == set()


@pytest.mark.parametrize("plain_loop", [True, False])
def test_detached_half_way_the_answers_are_the_same(
    make_rig: Any, plain_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def detaching(rig: Rig) -> Iterator[Iterable[Any]]:
        for turn, sent in enumerate(storm(rig, rounds=1)):
            if turn == 40:
                assert rig.canary.step > 10
                detach_from_scheduler(rig.scheduler)
            yield sent

    rig = make_rig(disable_overlap_schedule=plain_loop)
    rig.run(detaching(rig))
    assert rig.found == []
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig(disable_overlap_schedule=plain_loop)
    assert canary_of(plain.scheduler) is None
    plain.run(storm(plain, rounds=1))
    assert plain.answers == rig.answers


def test_a_canary_is_installed_in_a_scheduler_that_has_served(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of the prefix cache have no history: their bytes get a baseline, their links none."""
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    rig = make_rig()
    rig.generate(prompts(3))
    canary = canary_obs.install_canary(rig.scheduler, CanaryConfig(endpoint="inproc"))
    try:
        rig.collect_from(canary)
        rig.canary.mark_ready()
        assert rig.canary.verdict()[0] is State.DEGRADED
        assert "adopted slots wait for a baseline" in " ".join(rig.canary.verdict()[1])
        rig.generate(prompts(3, seed=1))
        assert rig.settle() == []
        with pytest.raises(UnsupportedEngine, match="wrapped already"):
            canary_obs.install_canary(rig.scheduler, CanaryConfig(endpoint="inproc"))
    finally:
        canary.detach()


def test_memory_that_is_released_is_not_read(make_rig: Any) -> None:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    rig = make_rig()
    rig.generate(prompts(3))
    first, kinds = rig.canary, ["kv_cache"]

    def script() -> Iterator[Iterable[Any]]:
        yield [ReleaseMemoryOccupationReqInput(tags=kinds)]
        assert canary_of(rig.scheduler) is None
        assert "forward" not in vars(rig.runner)
        for buffer in (*rig.runner.token_to_kv_pool.k_buffer, *rig.runner.token_to_kv_pool.v_buffer):
            buffer.fill_(3)  # what is mapped later is other memory
        yield [ResumeMemoryOccupationReqInput(tags=kinds)]
        yield ()

    rig.run(script())
    rig.collect_from()
    assert rig.canary is not first
    rig.generate(prompts(3, seed=1))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())


def test_every_hook_is_applied_by_sglang() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert set(HOOKS) <= HookRegistry._patched
