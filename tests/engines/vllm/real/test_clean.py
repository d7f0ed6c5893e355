"""No false alarms, and the same outputs with the canary as without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import State
from tests.engines.vllm.real.rig import LATENT, Rig, prompts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how vLLM runs it."""

    model: str = "llama"
    engine: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    checks: int  # slots verified, at least
    preempts: bool = False
    draft: tuple[str, str | None] | None = None  # method, and name of a draft model where it has its own
    prompts: int = 24


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CASES = {
    "llama": Case(checks=200_000),
    "pressure": Case(engine={"num_gpu_blocks_override": 40}, preempts=True, checks=200_000),
    "hybrid": Case(
        model="gemma3", engine={"num_gpu_blocks_override": 150}, preempts=True, groups=3, checks=200_000
    ),
    "sliding": Case(model="mistral", engine={"num_gpu_blocks_override": 60}, preempts=True, checks=100_000),
    "latent": Case(
        model="deepseek",
        engine=LATENT | {"block_size": 16, "num_gpu_blocks_override": 120},
        preempts=True,
        checks=200_000,
    ),
    "ngram": Case(engine={"speculative_config": NGRAM, "async_scheduling": False}, checks=150_000),
    # The longest requests come so near to the limit that drafting is left out for all.
    "draft": Case(
        engine={"max_model_len": 284, "async_scheduling": False},
        draft=("draft_model", "llama_draft"),
        groups=2,
        checks=150_000,
    ),
    "eagle": Case(
        engine={"max_model_len": 284, "async_scheduling": False, "num_gpu_blocks_override": 60},
        draft=("eagle", "llama_eagle"),
        prompts=12,
        groups=2,
        checks=150_000,
        preempts=True,
    ),
    "eagle3": Case(
        engine={"max_model_len": 512, "async_scheduling": False, "load_format": "dummy"},
        draft=("eagle3", "llama_eagle3"),
        prompts=8,
        groups=2,
        checks=50_000,
    ),
    "mtp": Case(
        model="glm_mtp",
        engine={"max_model_len": 512, "async_scheduling": False, "load_format": "dummy"},
        draft=("mtp", None),
        prompts=8,
        groups=2,
        checks=50_000,
    ),
}


def test_the_cases_amount_to_a_million_checks() -> None:
    assert sum(case.checks for case in CASES.values()) >= 10**6


@pytest.mark.parametrize("name", CASES)
def test_no_violation_and_same_outputs(make_rig: Any, models: Any, name: str) -> None:
    case = CASES[name]
    engine = dict(case.engine)
    if case.draft:
        method, draft = case.draft
        own = {"model": str(models(draft))} if draft else {}
        engine["speculative_config"] = {"method": method, "num_speculative_tokens": 3, **own}
    asked = prompts(case.prompts)
    rig = make_rig(case.model, **engine)
    preempted, threads = count_preemptions(rig), torch.get_num_threads()
    answers = rig.generate(asked, 24)
    again = rig.generate(asked[::-1], 24)[::-1]
    assert torch.get_num_threads() == threads, "later tests would wait for threads that share a core"
    assert rig.settle() == []
    assert len(rig.canary.state.groups) == case.groups
    assert rig.canary.state.coverage == 1.0
    assert rig.canary.verdict() == (State.OK, ())
    # vLLM keeps no prefix cache for MLA on CPUs.
    assert (rig.canary.sweeper.last.total > 0) == (name != "latent")
    assert rig.checks() > case.checks
    assert bool(preempted) == case.preempts
    print(f"{name}: {rig.checks()} slot checks, {rig.canary.step} steps, {len(preempted)} preemptions")
    plain = make_rig(case.model, canary={"mode": "none"}, **engine)
    assert "execute_model" not in vars(plain.runner)
    assert plain.generate(asked, 24) == answers
    assert plain.generate(asked[::-1], 24)[::-1] == again


def count_preemptions(rig: Rig) -> list[str]:
    """Requests that the scheduler preempts from now on, one entry each time."""
    scheduler, found = rig.core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *given: Any, **named: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *given, **named)

    scheduler._preempt_request = counted
    return found
