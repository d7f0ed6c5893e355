"""fp8 KV on a real CPU engine: damage to the scales that layers keep apart from the cache is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.forwards import acknowledge
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.test_layouts import wants_fp8

pytestmark = wants_fp8


@pytest.fixture(scope="module")
def rig(models: Callable[[str], Any]) -> Iterator[Rig]:
    made = Rig(models("llama"), kv_cache_dtype="fp8_e4m3")
    yield made
    made.close()


def layer(rig: Rig) -> Any:
    group = rig.adapter.vllm_groups[0]
    return rig.runner.compilation_config.static_forward_context[group.layers[1]]


def test_clean_and_ok(rig: Rig) -> None:
    assert [view.name for view in rig.adapter.groups] == ["full", "scale"]
    rig.generate(prompts(6), 8)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize(("attribute", "part"), [("_k_scale", "k"), ("_v_scale", "v")])
@pytest.mark.parametrize("held", ["on the device", "in Python"])
def test_a_scale_that_changed_is_found(rig: Rig, attribute: str, part: str, held: str) -> None:
    rig.fresh()
    rig.generate(prompts(1), 2)  # with the reset, which takes the scales as they are
    if held == "on the device":
        scale = getattr(layer(rig), attribute)
        bits = scale.view(torch.int32)
        bits ^= 1 << 20
    else:
        setattr(layer(rig), f"{attribute}_float", 1.25)
        rig.generate(prompts(1), 2)
    found = rig.settle()
    assert {violation.reason for violation in found} == {Reason.KV_DATA}
    assert {(violation.group, str(violation.part)) for violation in found} == {("scale", part)}
    assert {violation.phase for violation in found} == {Phase.PATROL}
    if held == "on the device":
        bits ^= 1 << 20
    else:
        setattr(layer(rig), f"{attribute}_float", 1.0)
        rig.generate(prompts(1), 2)


def test_other_scales_from_the_next_reset_of_the_cache_on(rig: Rig) -> None:
    rig.fresh()
    acknowledge(rig)
    layer(rig)._k_scale.fill_(2.0)
    layer(rig)._k_scale_float = 2.0
    assert rig.llm.reset_prefix_cache()
    rig.generate(prompts(2), 4)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
