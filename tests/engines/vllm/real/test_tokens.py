"""The worker's tokens are held to the scheduler's: V1, synchronous and asynchronous (V2: see test_v2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.vocabulary import State
from tests.engines.vllm.real import tokens
from tests.engines.vllm.real.rig import Rig, keep_asynchronous, prompts
from tests.unchecked import Report

NAMES = {
    "the scheduler does not send its tokens": tokens.NOT_COMPARED,
    "the scheduler's tokens are those of long ago": tokens.NOT_COMPARED,
    "a forward is not given the scheduler's tokens": tokens.NOT_CHECKED,
    "the tail does not verify": tokens.NOT_CHECKED,
}


def report_tokens(engine: str, found: dict[str, Any], unchecked: Report, kind: str = "") -> None:
    assert "write_token" in found["garbled"]
    assert "write_token" in found["swapped"]
    assert set(found["unseen"]) == set(NAMES)
    for way, seen in found["unseen"].items():
        assert seen["accused"] == [], way
        verdict = (seen["state"], seen["reasons"])
        unchecked(way + kind, engine, verdict, names=NAMES[way], seconds=seen["seconds"])


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def rig(request: pytest.FixtureRequest, models: Any) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            keep_asynchronous(patch.setattr)
        made = Rig(models("llama"), async_scheduling=request.param)
        assert made.runner.use_async_scheduling is request.param
        yield made
        made.close()


def test_wrong_tokens_are_found_and_comparisons_that_do_not_run(rig: Rig, unchecked: Report) -> None:
    kind = ", asynchronous" if rig.runner.use_async_scheduling else ""
    report_tokens("vLLM V1", tokens.tried(rig), unchecked, kind)


def test_every_request_of_clean_traffic_is_compared(rig: Rig) -> None:
    """Shared prefixes, prompts in chunks, preempted requests that are computed anew."""
    rig.fresh()
    before = rig.canary.check_coverage._window[-1]
    for seed in range(3):
        rig.generate(prompts(12, seed=seed, shared=300), 20)
    assert rig.settle() == []
    after = rig.canary.check_coverage._window[-1]
    assert after.compared - before.compared > 200
    assert after.left_out == before.left_out
    assert rig.canary.verdict() == (State.OK, ())
