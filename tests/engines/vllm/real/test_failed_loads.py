"""Loads that fail, by vLLM's own scheduler: what is computed again is clean, stale bytes are violations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.vllm.runner_v2 import V2Adapter
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.rig import Rig, prompts

LENGTH = 230


CONNECTOR = {
    "kv_connector": "FailingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_module_path": "tests.engines.vllm.real.failing_connector",
}  # fmt: skip


@pytest.fixture(scope="module")
def rig(models: Callable[[str], Path]) -> Iterator[Rig]:
    made = Rig(models("llama"), num_gpu_blocks_override=60, kv_transfer_config=CONNECTOR)
    yield made
    made.close()


@pytest.fixture
def failures() -> Iterator[Any]:
    from tests.engines.vllm.real.failing_connector import FAILURES, Failures

    yield FAILURES
    caches = FAILURES.caches
    vars(FAILURES).update(vars(Failures(caches=caches)))


def stored(rig: Rig, seed: int) -> tuple[list[int], list[list[int]]]:
    """A prompt that the connector keeps, and the device does not; its answer."""
    prompt = prompts(1, seed=seed, shared=LENGTH)[0][:LENGTH]
    rig.fresh()
    answer = rig.generate([prompt], 6)
    assert rig.llm.reset_prefix_cache()
    rig.generate(prompts(8, seed=4), 2)  # takes the blocks that the prompt had
    assert rig.llm.reset_prefix_cache()
    rig.settle()
    rig.found.clear()
    return prompt, answer


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("fail", ["request", "block"])
def test_a_failed_load_is_computed_again_without_an_alarm(
    rig: Rig, failures: Any, fail: str, forget: bool
) -> None:
    """Or loaded again, where the connector still has it."""
    prompt, answer = stored(rig, 60)
    failures.fail, failures.forget = fail, forget
    assert rig.generate([prompt], 6) == answer
    assert failures.held, "nothing failed"
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())


def test_a_block_that_fails_with_the_forward_is_no_lost_load(rig: Rig, failures: Any) -> None:
    """vLLM hears of it after the forward that has read it, and computes that one again."""
    prompt, answer = stored(rig, 65)
    failures.fail, failures.at_once = "block", True
    again = rig.generate([prompt], 6)
    assert failures.held, "nothing failed"
    rig.settle()
    if isinstance(rig.adapter, V2Adapter):
        # vllm#49250: on the device it counts on from where it was, and computes tokens at wrong positions.
        found = set(rig.reasons())
        assert (Phase.HEAD, Reason.POSITION) in found
        assert not found & {(Phase.HEAD, Reason.LOST_LOAD), (Phase.HEAD, Reason.KV_DATA)}
        assert again != answer
    else:
        assert rig.found == []
        assert again == answer
        assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("fail", ["request", "block"])
def test_a_failure_that_the_scheduler_ignores_is_found(
    rig: Rig, failures: Any, fail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, _ = stored(rig, 61)
    monkeypatch.setattr(rig.core.scheduler, "_handle_failed_recving", lambda _: set())
    monkeypatch.setattr(rig.core.scheduler, "_handle_invalid_blocks", lambda *_: set())
    failures.fail = fail
    rig.generate([prompt], 6)
    assert failures.held, "nothing failed"
    rig.settle()
    assert (Phase.HEAD, Reason.UNWRITTEN) in rig.reasons(), "before the forward that reads it"
    assert {violation.reason for violation in rig.found} == {Reason.UNWRITTEN}


def test_a_receive_that_timed_out_and_lands_later_is_found(rig: Rig, failures: Any) -> None:
    """It was given up, and its blocks were computed instead: the late copy writes over them."""
    prompt, answer = stored(rig, 62)
    failures.fail, failures.forget = "block", True
    assert rig.generate([prompt], 6) == answer
    ((block, kept),) = failures.held
    failures.held = [(block, [layer + 1 for layer in kept])]  # another engine's bytes differ
    assert rig.settle() == []
    failures.land()
    assert {violation.reason for violation in rig.settle()} == {Reason.KV_DATA}
    assert {violation.slot // 32 for violation in rig.found} == {block}


def _aborted(rig: Rig, failures: Any, seed: int) -> str:
    """A request is aborted while its load is under way; vLLM's name of it."""
    prompt, _ = stored(rig, seed)
    failures.hold = True
    rig.start({"aborted": prompt})
    for _ in range(20):
        rig.step()
        if failures.waiting:
            break
    (name,) = failures.waiting
    rig.llm.llm_engine.abort_request(["aborted"])
    rig.step()
    return str(name)


def _report(failures: Any, name: str) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    failures.waiting.discard(name)
    get_kv_transfer_group()._arrived.add(name)


def test_blocks_of_an_aborted_receive_are_not_used_until_it_ends(rig: Rig, failures: Any) -> None:
    name = _aborted(rig, failures, 63)
    rig.generate(prompts(6, seed=70), 4)
    failures.land()
    assert rig.settle() == [], "vLLM keeps the blocks"
    _report(failures, name)
    rig.generate(prompts(8, seed=71), 4)  # takes them
    assert rig.settle() == []


def test_a_receive_whose_blocks_were_freed_under_way_is_found(rig: Rig, failures: Any) -> None:
    """The connector reports the end of an aborted receive, and it goes on."""
    name = _aborted(rig, failures, 64)
    _report(failures, name)
    rig.step()
    rig.start({str(seed): prompts(1, seed=seed, shared=300)[0] for seed in range(40, 45)})
    rig.step(8)
    assert rig.settle() == []
    failures.land()
    assert {violation.reason for violation in rig.settle()} == {Reason.KV_DATA}
    rig.finish()
