"""What SGLang counts itself, compared with what the canary was shown."""

from __future__ import annotations

import time
from typing import Any

import pytest

from canary_obs.engines.sglang import adapter
from canary_obs.vocabulary import State
from tests.engines.sglang.real import ways
from tests.engines.sglang.real.tiers import PROMPT, TIER, generate, install, push_out, tier
from tests.engines.vllm.real.forwards import acknowledge, replaced
from tests.unchecked import Report


def report(found: dict[str, dict[str, Any]], unchecked: Report) -> None:
    for way, seen in found.items():
        assert seen["accused"] == [], way
        unchecked(way, "SGLang", seen["verdict"], names=seen["names"], seconds=seen["seconds"])


@pytest.fixture(params=["of a CPU", "of GPUs"])
def rig(request: pytest.FixtureRequest, make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the hooks of both. On a GPU the same ways are called the same."""
    monkeypatch.setattr(adapter, "concurrent", lambda device: request.param == "of GPUs")
    return make_rig("windows", page_size=16)


@pytest.mark.parametrize("kind", ["forwards", "tokens", "hits", "walks"])
def test_ways_not_to_check(rig: Any, unchecked: Report, kind: str) -> None:
    found = ways.tried(rig, getattr(ways, kind)(rig), sweeps=kind == "walks")
    report(found, unchecked)


def test_layers_and_bytes_that_are_hidden(make_rig: Any, unchecked: Report) -> None:
    report(ways.hidden(make_rig()), unchecked)


def test_a_draft_pass_that_is_not_shown(make_drafting: Any, unchecked: Report) -> None:
    rig = make_drafting("eagle")
    report(ways.tried(rig, ways.drafts(rig)), unchecked)


def test_loads_that_are_not_compared(make_rig: Any, unchecked: Report) -> None:
    """From host memory. What arrives is awaited, until it is compared."""
    install()
    rig = make_rig(**TIER)
    generate(rig, PROMPT)
    push_out(rig)
    assert rig.settle() == []
    acknowledge(rig)
    assert rig.canary.verdict() == (State.OK, ())
    with replaced(tier(rig), "_compare", ways.nothing):
        started = time.monotonic()
        generate(rig, PROMPT)
        verdict = rig.canary.verdict()
        seconds = time.monotonic() - started
    names = "slot checks of the last"
    found = {
        "verdict": verdict,
        "seconds": seconds,
        "names": names,
        "accused": [repr(one) for one in rig.settle()],
    }
    report({"what is loaded from host memory is not compared": found}, unchecked)
