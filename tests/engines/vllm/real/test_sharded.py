"""Two ranks share each request's tokens (decode context parallelism): on CPUs with a stand-in for attention.

Where there are two GPUs, with vLLM's own: `python3 -m pytest tests/engines/vllm/real/test_sharded.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Phase, Reason
from tests.engines.vllm.real.prefill import is_v2
from tests.engines.vllm.real.rig import prompts
from tests.engines.vllm.real.sharded_ranks import BLOCK, Finding, ShardedRig
from tests.engines.vllm.storm.legs import ON_GPU
from tests.sizes import sized

ENGINE: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 96}
if torch.cuda.is_available():
    # Captured without a warm-up, NCCL's communicator of these ranks would be made during the capture.
    ENGINE["compilation_config"] = ON_GPU["compilation_config"] | {"cudagraph_num_of_warmups": 1}
ASKED = prompts(10, shared=100, groups=3)


# Each rank holds all of a latent row, so that ranks may share its tokens; vLLM's attention on CPUs cannot.
MODELS = {"": "llama_one_head"} | ({"latent-": "deepseek"} if torch.cuda.is_available() else {})
CASES = [
    pytest.param((model, interleave), id=f"{name}{interleave}")
    for name, model in MODELS.items()
    for interleave in sized([1, 16], [16])
]


@pytest.fixture(scope="module", params=CASES)
def rig(models: Any, request: Any) -> Iterator[ShardedRig]:
    name, interleave = request.param
    engine = ENGINE
    if torch.cuda.is_available() and name == "llama_one_head" and not is_v2():
        # V1's warm-up leaves attention out: its capture would make NCCL's communicator, and fail.
        engine = ENGINE | {"compilation_config": ON_GPU["compilation_config"], "enforce_eager": True}
    made = ShardedRig(models(name), interleave, **engine)
    yield made
    made.close()


def test_answers_stay_and_nothing_is_found(rig: ShardedRig) -> None:
    def answers() -> list[list[list[int]]]:
        return [rig.generate(ASKED, 12), rig.generate(ASKED[::-1], 12)]

    plain = rig.without_canary(answers)
    rig.new_findings()
    protected = answers()
    if not torch.cuda.is_available():  # there, vLLM 0.33 without the plugin answers the same in many ways
        assert protected == plain
    assert rig.new_findings() == [set(), set()]
    for rank in rig.checked():
        assert (rank.state, rank.reasons, rank.groups, rank.faults) == ("ok", (), ("full",), {})
        assert rank.verified > 3000
        assert rank.hashed > 3000
        assert rank.coverage == 1
        assert rank.protected == rank.allocated


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flip_on_one_rank_is_found_there_in_its_slot(rig: ShardedRig, rank: int) -> None:
    rig.fresh()
    rig.new_findings()
    rig.generate([ASKED[0][:80]], 2)
    (block,) = rig.idle_blocks()
    of_rank = [at for at in range(2 * BLOCK) if at // rig.interleave % 2 == rank]
    for own in (of_rank[0], of_rank[13], of_rank[-1]):
        slot = block * 2 * BLOCK + own
        rig.flip(rank, slot)
        found = rig.new_findings()
        phases = Phase.PATROL, Phase.SWEEP
        assert found[rank] == {Finding(phase, Reason.KV_DATA, slot, own) for phase in phases}
        assert not found[1 - rank]
        rig.flip(rank, slot)
    assert rig.new_findings() == [set(), set()]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flip_under_a_request_is_found_when_its_block_is_used_up(rig: ShardedRig, rank: int) -> None:
    rig.fresh()
    rig.new_findings()
    rig.start({"own": ASKED[1], "other": ASKED[4]}, 60)
    rig.step(6)
    slot = rig.blocks_of("own")[1] * 2 * BLOCK + rank * rig.interleave
    rig.flip(rank, slot)
    rig.step(2)
    found = rig.new_findings()
    assert {(one.reason, one.slot) for one in found[rank]} == {(Reason.KV_DATA, slot)}
    assert {one.position for one in found[rank]} == {2 * BLOCK + rank * rig.interleave}
    assert not found[1 - rank]
    rig.flip(rank, slot)
    rig.finish()
    assert rig.new_findings() == [set(), set()]


def test_slots_are_those_of_vllms_own_kernels() -> None:
    command = [sys.executable, "-m", "tests.engines.vllm.real.interpreted_mapping"]
    own = {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"v1": 2648, "v2": 2648}
