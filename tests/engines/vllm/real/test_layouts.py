"""KV dtypes, and the tiles in which vLLM lays KV out for AMX: clean, and every flip found.

Which layout a dtype gets depends on the CPU; what the CPU lacks is named as skipped.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from canary_obs.records import Violation
from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.test_clean import count_preemptions

AMX = torch.cpu._is_amx_tile_supported()
FP8 = AMX or torch.cpu._is_avx512_supported()
wants_fp8 = pytest.mark.skipif(
    not FP8, reason="vLLM keeps fp8 KV on CPUs with AVX-512 or AMX; this has neither"
)
wants_amx = pytest.mark.skipif(not AMX, reason="vLLM's AMX_MLA backend wants a CPU with AMX; this has none")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How vLLM keeps KV."""

    dtype: str
    kv: str = "auto"
    model: str = "llama"
    isa: str | None = "vec"  # by which vLLM names the layout
    engine: dict[str, Any] = field(default_factory=lambda: {"num_gpu_blocks_override": 40})


TILES = "amx" if AMX else "vec"
CASES = {
    "bfloat16": Case(dtype="bfloat16", isa=TILES),
    "fp8_e4m3": Case(dtype="float32", kv="fp8_e4m3"),
    "fp8_e5m2": Case(dtype="float16", kv="fp8_e5m2"),
    "fp8_bfloat16": Case(dtype="bfloat16", kv="fp8", isa=TILES),
    "latent": Case(
        dtype="bfloat16", model="deepseek", isa=None,
        engine={"attention_backend": "AMX_MLA", "num_gpu_blocks_override": 40},
    ),
}  # fmt: skip
NEEDS = {"fp8_e4m3": [wants_fp8], "fp8_e5m2": [wants_fp8], "fp8_bfloat16": [wants_fp8], "latent": [wants_amx]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, [])) for name in CASES])
def test_clean_same_outputs_and_flips_found(make_rig: Any, name: str) -> None:
    case, asked = CASES[name], prompts(24)
    engine = {"dtype": case.dtype, "kv_cache_dtype": case.kv, **case.engine}
    rig = make_rig(case.model, **engine)
    layer = next(iter(rig.runner.compilation_config.static_forward_context.values()))
    assert getattr(layer, "isa", None) == case.isa
    preempted = count_preemptions(rig)
    answers = rig.generate(asked, 24)
    assert rig.settle() == []
    assert preempted
    assert rig.canary.state.coverage == 1.0
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.checks() > 100_000
    flip_everywhere(rig, rig.idle_blocks())
    rig.fresh()
    rig.start({"held": asked[0]})
    rig.step(3)
    flip_everywhere(rig, rig.blocks_of("held")[:-1])
    plain = make_rig(case.model, canary={"mode": "none"}, **engine)
    assert plain.generate(asked, 24) == answers


def flip_everywhere(rig: Rig, blocks: list[int]) -> None:
    """One bit at two places of every layer, head and part, each time in one of some blocks; all are found."""
    draw, group = random.Random(1), rig.adapter.vllm_groups[0]
    for number, _ in enumerate(group.layers):
        cache = rig.layer_cache(0, number).view(torch.uint8)
        # In all of vLLM's CPU layouts K is the first half of a head's page and V the second; MLA has K only.
        parts = (Part.K,) if cache.dim() == 3 else (Part.K, Part.V)
        cache = cache.view(len(cache), len(cache[0]), len(parts), -1)
        for head in range(cache.shape[1]):
            for index, part in enumerate(parts * 2):
                block = draw.choice(blocks)
                page = cache[block, head, index % len(parts)]
                found = flip(rig, page, draw.randrange(page.numel()), 1 << draw.randrange(8))
                assert {violation.phase for violation in found} == {Phase.PATROL, Phase.SWEEP}
                assert {violation.reason for violation in found} == {Reason.KV_DATA}
                assert {violation.part for violation in found} == {part}
                (slot,) = {violation.slot for violation in found}
                assert slot // group.block_size == block


def flip(rig: Rig, page: torch.Tensor, byte: int, bits: int) -> list[Violation]:
    """What is found while a byte of a page differs."""
    with rig.at_rest():
        rig.found.clear()
        page[byte] ^= bits
        found = list(rig.settle())
        page[byte] ^= bits
    return found
