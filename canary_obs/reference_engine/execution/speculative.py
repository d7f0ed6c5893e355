"""Speculative decoding: a small model proposes tokens, the large one checks them all in one forward.

The draft model is fed the token after each position: its entry p, in the slot of p, is that of token p + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from canary_obs.reference_engine.cache.pool import KVPool
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.graph import DecodeGraphs
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.model.llama import Llama
from canary_obs.reference_engine.model.shapes import ModelShape
from canary_obs.reference_engine.scheduling.request import Request, Status
from canary_obs.reference_engine.scheduling.scheduler import Scheduler, Statistics
from canary_obs.reference_engine.settings import EngineConfig
from canary_obs.reference_engine.tokenizer import EOS

Span = tuple[Request, int]  # a request, and the first draft entry to compute


def draft_runner(
    config: EngineConfig, shape: ModelShape, weights: dict[str, Tensor], target: Runner
) -> Runner:
    """The target's first layers as a model of its own, with its own KV in the target's slots."""
    kept = {
        name: weight
        for name, weight in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < config.draft_layers
    }
    small = replace(shape, layers=config.draft_layers)
    model, pool = Llama(small, kept, config.max_context, target.device), KVPool(small, config)
    pool.req_to_token = target.pool.req_to_token
    captured = config.cuda_graphs and target.device.type == "cuda" and pool.kv is not None
    return Runner(model, pool, DecodeGraphs(model, pool, config.max_running) if captured else None)


class Drafter:
    """Proposes `draft_tokens` tokens per request and step. Proposals lie in `tokens` behind `length`."""

    def __init__(self, runner: Runner, target: Runner, scheduler: Scheduler) -> None:
        self.runner, self._target, self._scheduler = runner, target, scheduler
        self._proposed_at_most = scheduler.config.draft_tokens

    @property
    def _statistics(self) -> Statistics:
        return self._scheduler.statistics

    def accept(self, batch: ForwardBatch, logits: Tensor) -> list[list[int]]:
        """The tokens that the target chose for each request: proposals it agrees with, and one of its own.

        Exactly the tokens, and the draws, of decoding one by one. Empty where a prompt is not through yet.
        """
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        chosen, first = [], 0
        for request, extend, count in zip(batch.requests, batch.extends, batch.scores, strict=True):
            ready = request.computed + extend >= request.length
            chosen.append(
                self._chosen(request, logits[first : first + count], greedy[first:]) if ready else []
            )
            first += count
        return chosen

    def propose(self, requests: Sequence[Request]) -> None:
        """Bring the draft KV of running requests up to their last token, and propose what may follow."""
        running = [request for request in requests if request.status is Status.RUNNING]
        if not running:
            return
        wanted = {request.serial: self._wanted(request) for request in running}
        spans = [(request, request.drafted) for request in running]
        found: dict[int, int] = {}
        number = 0
        while spans:
            for (request, _), token in zip(spans, self._forward(spans, number), strict=True):
                if number == 0:
                    request.drafted = request.computed
                if number < wanted[request.serial]:
                    request.tokens[request.length + number] = token
                    found[request.serial] = number + 1
            spans = [(r, r.computed + number) for r in running if wanted[r.serial] > number + 1]
            number += 1
        for request in running:
            request.drafts = found.get(request.serial, 0)
            self._statistics.drafts += request.drafts

    def _chosen(self, request: Request, logits: Tensor, greedy: list[int]) -> list[int]:
        sampling, chosen = request.sampling, []
        for number, row in enumerate(logits):
            chosen.append(self._pick(request, request.length + number, row, greedy[number]))
            ended = chosen[-1] == EOS and sampling.stop_at_eos
            ended |= request.length + len(chosen) - request.prompt_length >= sampling.max_tokens
            if ended or chosen[-1] != request.tokens[request.length + number]:
                break
        self._statistics.drafts_accepted += len(chosen) - 1
        return chosen

    def _pick(self, request: Request, position: int, row: Tensor, greedy: int) -> int:
        if (oracle := request.sampling.oracle) is not None:
            return int(oracle.tokens(position, position + 1)[0])
        if request.generator is None:
            return greedy
        return int((row + self._target.noise(request, row.shape[0]).to(row.device)).argmax())

    def _wanted(self, request: Request) -> int:
        """How many tokens to propose: none for a prompt, one where there are no slots to look ahead."""
        left = request.sampling.max_tokens - len(request.output) - 1
        wanted = min(self._proposed_at_most, left) if request.remaining == 1 else 0
        return wanted if wanted < 2 or self._scheduler.reserve_lookahead_slots(request, wanted - 1) else 1

    def _forward(self, spans: Sequence[Span], number: int) -> list[int]:
        """Compute entries up to the last known token, or `number` proposals further; the likeliest next."""
        self._statistics.draft_forwards += 1
        stops = [request.computed + number for request, _ in spans]
        batch = self.runner.batch(
            tuple(request for request, _ in spans),
            tuple(start for _, start in spans),
            tuple(stop - start for (_, start), stop in zip(spans, stops, strict=True)),
            [r.tokens[start + 1 : stop + 1] for (r, start), stop in zip(spans, stops, strict=True)],
            (1,) * len(spans),
        )
        tokens: list[int] = self.runner.forward(batch).argmax(dim=-1).tolist()
        return tokens
