"""A vLLM in this process that speculates with a draft that has its own layers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from canary_obs.demo.in_process_vllm import LLAMA, SHAPES, InProcessVllm
from canary_obs.engines.vllm.adapter import VllmAdapter
from tests.engines.vllm.real.rig import prompts

METHODS = {"eagle": "eagle", "model": "draft_model"}
AHEAD = 3
SEED = 11
_LONGEST_PROMPT = 260
# With other weights of 0.02, the last token decides most answers and the context the others.
_EMBEDDING = 0.046


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The engine and its load."""

    runner: str  # v1, v2
    draft: str  # eagle, model
    requests: int
    tokens: int  # of each answer
    output: Path | None


@dataclass(slots=True)
class SchedulerCounts:
    """What the scheduler did within `counting`, and microseconds of each call of the drafts' `begin`."""

    steps: int = 0
    accepted: int = 0
    rejected: int = 0
    preempted: int = 0
    begin_us: list[float] = field(default_factory=list)


def start(folder: Path, plan: Plan) -> InProcessVllm:
    """A target of four layers, a draft of one, and so few blocks that requests are preempted."""
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1" if plan.runner == "v2" else "0", "VLLM_PLUGINS": ""}
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        _prepare_cpu(plan.runner)
    draft = folder / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(LLAMA | SHAPES["small"] | {"num_hidden_layers": 1}))
    speculation = {"method": METHODS[plan.draft], "model": str(draft), "num_speculative_tokens": AHEAD}
    size = 16 if on_gpu else 32
    vllm = InProcessVllm(
        folder, "small", SEED, speculative_config=speculation, enable_prefix_caching=True,
        # The longest requests reach the limit, where drafting is skipped.
        max_model_len=_LONGEST_PROMPT + plan.tokens + 2,
        max_num_seqs=16, max_num_batched_tokens=512, block_size=size,
        num_gpu_blocks_override=(2400 if on_gpu else 1300) // size,
        gpu_memory_utilization=0.1, async_scheduling=True if on_gpu else None,
    )  # fmt: skip
    draw_weights(vllm)
    return vllm


def _prepare_cpu(runner: str) -> None:
    """Let V2's Triton kernels run in the interpreter; call it before vLLM is imported."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    if runner == "v2":
        from tests.engines.vllm.real.interpreted import stand_in_driver

        stand_in_driver()
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False  # it copies the weights before ours are drawn


def draw_weights(vllm: InProcessVllm) -> None:
    """Token t is mostly followed by t + 1, which the draft proposes: not all proposals are accepted."""
    target, draft = vllm.runner.get_model(), drafter(vllm).model
    draft = getattr(draft, "unwrap", lambda: draft)()
    generator = torch.Generator("cpu").manual_seed(SEED)

    def normal(weights: torch.Tensor, spread: float) -> None:
        weights.data.copy_(torch.randn(weights.shape, generator=generator) * spread)

    with torch.inference_mode():
        embedding = target.model.embed_tokens.weight
        normal(embedding, _EMBEDDING)
        target.lm_head.weight.data.copy_(embedding.roll(1, 0))
        for name, weights in draft.named_parameters():
            if weights.dim() == 1:
                weights.data.fill_(1.0)
            elif "embed_tokens" in name:
                weights.data.copy_(embedding)
            elif "lm_head" in name:
                weights.data.copy_(target.lm_head.weight)
            elif "fc." in name:  # EAGLE's input: the token's embedding, then the target's hidden state
                size = weights.shape[0]
                weights.data.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
            else:
                normal(weights, 0.02)


def drafter(vllm: InProcessVllm) -> Any:
    """The proposer of draft tokens, on either runner."""
    return getattr(vllm.runner, "drafter", None) or vllm.runner.speculator


def answers(vllm: InProcessVllm, plan: Plan) -> list[list[int]]:
    """Answers to prompts with four shared beginnings, and to the same prompts in reverse order."""
    found: dict[int, list[int]] = {}

    def keep(outputs: list[Any]) -> bool:
        done = (output for output in outputs if output.finished)
        found.update((int(each.request_id.split("-")[1]), list(each.outputs[0].token_ids)) for each in done)
        return False

    vllm.core.reset_prefix_cache()
    load = prompts(plan.requests, seed=SEED)
    for ordered in (load, load[::-1]):
        vllm.add_requests(ordered, plan.tokens)
        vllm.run(keep)
    vllm.synchronize()
    return [found[number] for number in sorted(found)]


@contextmanager
def counting(vllm: InProcessVllm, adapter: VllmAdapter) -> Iterator[SchedulerCounts]:
    """Count what the scheduler does and time the drafts' `begin` (host time)."""
    seen, scheduler, drafts = SchedulerCounts(), vllm.core.scheduler, adapter._drafts
    update, preempt = scheduler.update_from_output, scheduler._preempt_request

    def updated(scheduled: Any, output: Any) -> Any:
        seen.steps += 1
        for request, proposed in scheduled.scheduled_spec_decode_tokens.items():
            if count := len(output.sampled_token_ids[output.req_id_to_index[request]]):
                seen.accepted += count - 1
                seen.rejected += len(proposed) - count + 1
        return update(scheduled, output)

    def preempted(*given: Any, **named: Any) -> Any:
        seen.preempted += 1
        return preempt(*given, **named)

    scheduler.update_from_output, scheduler._preempt_request = updated, preempted
    if drafts is not None:
        drafts.begin = _timed(drafts.begin, seen.begin_us)  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del scheduler.update_from_output, scheduler._preempt_request
        if drafts is not None:
            del drafts.begin


def _timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            spent.append(1e6 * (time.perf_counter() - began))

    return timed
