"""No false alarm, and vLLM answers the same with the canary as without."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.records import State
from tests.engines.vllm.real.rig import prompts

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 1),
    "pressure": ("llama", {"num_gpu_blocks_override": 40}, 1),
    "hybrid": ("gemma3", {"num_gpu_blocks_override": 150}, 3),
    "sliding": ("mistral", {"num_gpu_blocks_override": 60}, 1),
    "latent": ("deepseek", {"block_size": 16, "num_gpu_blocks_override": 120}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_no_violation_and_same_outputs(make_rig: Any, case: str) -> None:
    model, engine, groups = CASES[case]
    asked = prompts(24)
    rig = make_rig(model, **engine)
    answers = rig.generate(asked, 24)
    again = rig.generate(asked[::-1], 24)[::-1]
    assert rig.settle() == []
    assert len(rig.canary.state.groups) == groups
    assert rig.canary.state.coverage == 1.0
    assert rig.canary.verdict() == (State.OK, ())
    # vLLM keeps no prefix cache for MLA on CPUs.
    assert (rig.canary.sweeper.last.total > 0) == (case != "latent")
    assert rig.checks() > 100_000
    print(f"{case}: {rig.checks()} slot checks, {rig.canary.step} steps")
    plain = make_rig(model, canary={"mode": "none"}, **engine)
    assert "execute_model" not in vars(plain.runner)
    assert plain.generate(asked, 24) == answers
    assert plain.generate(asked[::-1], 24)[::-1] == again
