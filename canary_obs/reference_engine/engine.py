"""The engine: requests in, one forward per step, tokens out."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from canary_obs.reference_engine.cache.connector import KVConnector
from canary_obs.reference_engine.cache.host_tier import HostTier
from canary_obs.reference_engine.cache.pool import KVPool
from canary_obs.reference_engine.execution.graph import DecodeGraphs
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.execution.speculative import Drafter, draft_runner
from canary_obs.reference_engine.model.checkpoint import load_checkpoint
from canary_obs.reference_engine.model.llama import Llama, random_weights
from canary_obs.reference_engine.model.tensor_parallel import Shard, heads_of
from canary_obs.reference_engine.scheduling.request import Request, Sampling, Status
from canary_obs.reference_engine.scheduling.scheduler import Plan, Scheduler, Statistics
from canary_obs.reference_engine.settings import EngineConfig
from canary_obs.reference_engine.tokenizer import EOS

ENGINE_VERSION = "1.0"


class Engine:
    """A real, small LLM engine on one device. Not thread-safe: one thread adds, aborts and steps."""

    version = ENGINE_VERSION

    def __init__(self, config: EngineConfig, shard: Shard | None = None) -> None:
        config.check()
        self.config = config
        self.shard = shard
        device = torch.device(config.device)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # Triton and NCCL work on the current device
        if config.checkpoint is None:
            shape, weights = config.shape, random_weights(config.shape, config.seed, config.dtype, device)
        else:
            shape, weights = load_checkpoint(config.checkpoint, config.dtype)
        if shard is not None:
            shape, weights = shard.shape(shape), shard.weights(weights)
        all_reduce = None if shard is None else shard.all_reduce
        model, pool = Llama(shape, weights, config.max_context, device, all_reduce), KVPool(shape, config)
        captured = config.cuda_graphs and device.type == "cuda" and pool.kv is not None
        captured = captured and shard is None and not pool.compressed
        graphs = DecodeGraphs(model, pool, config.max_running) if captured else None
        self.runner = Runner(model, pool, graphs)
        self.connector = KVConnector()
        self.statistics = Statistics()
        self.scheduler = Scheduler(config, self.statistics)
        self.drafter: Drafter | None = None
        if config.draft_layers:
            drafts = draft_runner(config, shape, weights, self.runner)
            self.drafter = Drafter(drafts, self.runner, self.scheduler)
        if config.host_pages:
            self.scheduler.host_tier = HostTier(pool.stores, config.page_size, config.host_pages)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._serial = 0
        self._failed: list[Request] = []  # to be returned by the next step

    def add_request(
        self, prompt: NDArray[np.int32], sampling: Sampling, request_id: str | None = None
    ) -> Request:
        """Queue a prompt (token ids [n]). Raises ValueError for one that can never run."""
        config = self.config
        total = len(prompt) + sampling.max_tokens
        if len(prompt) < 1 or sampling.max_tokens < 1 or total > config.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens with max_tokens={sampling.max_tokens}: each at least 1 "
                f"and together at most max_context={config.max_context}; shorten one or enlarge it"
            )
        name = request_id if request_id is not None else f"r{self._serial:06d}"
        if name in self._requests:
            raise ValueError(f"request id {name!r} is in use; ids are unique among unfinished requests")
        generator = None
        if sampling.temperature > 0:
            generator = torch.Generator().manual_seed(sampling.seed)
        tokens = np.zeros(config.max_context, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        request = Request(
            id=name,
            serial=self._serial,
            prompt_length=len(prompt),
            sampling=sampling,
            tokens=tokens,
            slots=np.zeros(config.max_context + config.page_size, dtype=np.int64),
            length=len(prompt),
            generator=generator,
        )
        self._serial += 1
        self._requests[name] = request
        self.scheduler.waiting.append(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Drop a waiting or running request now. False = not here (any more)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.status is Status.RUNNING:
            self.scheduler.release(request, Status.ABORTED)
        else:
            self.scheduler.waiting.remove(request)
            request.status = Status.ABORTED
        self.statistics.aborts += 1
        return True

    def recompute(self, request_id: str, keep: int) -> int:
        """Start a running request again; of what it computed, the first `keep` tokens stay cached.

        Tokens that it has given out stay; those of the forward under way are dropped. Returns how many it
        had computed.
        """
        request = self._requests[request_id]
        computed, request.cacheable = request.computed, min(request.cacheable, keep)
        self.scheduler.preempt(request)
        if request.generator is not None and not request.output.size:
            request.generator.manual_seed(request.sampling.seed)  # a draw may have been dropped
        return computed

    def fail(self, request_id: str) -> None:
        """End a request with an error; nothing that it computed is cached. The next step returns it."""
        request = self._requests.pop(request_id)
        if request.status is Status.RUNNING:
            request.cacheable = 0
            self.scheduler.release(request, Status.FAILED)
        else:
            self.scheduler.waiting.remove(request)
            request.status = Status.FAILED
        self._failed.append(request)
        self.statistics.failures += 1

    def finish(self, request: Request) -> None:
        """End a running request with the tokens that it has; what it computed goes to the prefix cache."""
        self.scheduler.release(request, Status.FINISHED)
        del self._requests[request.id]
        self.statistics.requests_finished += 1

    def step(self) -> tuple[Request, ...]:
        """One forward over what can run now; returns the requests that finished or failed."""
        plan = self.scheduler.schedule()
        if not plan.requests:
            return self._take_failed()
        self.statistics.forwards += 1
        batch = self.runner.prepare(plan)
        logits = self.runner.forward(batch)
        if self.drafter is None:
            sampled = self.runner.sample(batch, logits)
            chosen = [[] if token is None else [token] for token in sampled]
        else:
            chosen = self.drafter.accept(batch, logits)
        self.before_commit()
        finished = self._commit(plan, chosen)
        if self.drafter is not None:
            self.drafter.propose(plan.requests)
        return finished + self._take_failed()

    def before_commit(self) -> None:
        """Called when a forward has run and its tokens are not given out yet. Requests may be taken away."""

    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests or self._failed)

    def idle(self) -> bool:
        """Called in a loop while there is no work; True = call again soon."""
        return False

    @property
    def kv_heads(self) -> range:
        """Global indices of the KV heads held here."""
        shard, held = self.shard, self.runner.model.shape.kv_heads
        return range(held) if shard is None else heads_of(held * shard.size, shard.rank, shard.size)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Waiting and running requests, oldest first."""
        return tuple(self._requests.values())

    def _commit(self, plan: Plan, chosen: list[list[int]]) -> tuple[Request, ...]:
        statistics = self.statistics
        finished = []
        for request, extend, tokens in zip(plan.requests, plan.extends, chosen, strict=True):
            if request.status is not Status.RUNNING:
                continue
            request.take(extend, tokens)
            if not tokens:
                continue
            statistics.tokens_generated += len(tokens)
            stopped = tokens[-1] == EOS and request.sampling.stop_at_eos
            if stopped or len(request.output) >= request.sampling.max_tokens:
                self.finish(request)
                finished.append(request)
        statistics.steps += 1
        statistics.tokens += sum(plan.extends)
        return tuple(finished)

    def _take_failed(self) -> tuple[Request, ...]:
        failed = tuple(self._failed)
        self._failed.clear()
        return failed
