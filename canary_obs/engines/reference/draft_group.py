"""The group of the draft model's layers, where entry p holds the token of position p + 1."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from canary_kernels.hashing import mix64
from canary_obs.engine_api.views import GroupStep, GroupTokens, StepView
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.reference.full_group import FullGroup
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.speculative import Drafter
from canary_obs.reference_engine.to_device import to_device

DRAFT = "draft"


class DraftGroup(FullGroup):
    """Written by the draft model's own forwards, under the slot numbers of the target."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        super().__init__(engine, drafter.runner, DRAFT)
        self.runner = drafter.runner
        self._digests = PrefixDigests(engine.config.max_running, first=1)

    def in_use(self) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""
        scheduler = self._engine.scheduler
        own = [request.slots[request.shared : request.drafted] for request in scheduler.running]
        detached = np.flatnonzero(scheduler.cache.detached)
        return torch.from_numpy(np.concatenate([scheduler.cache.held(), detached, *own]))

    def holders(self, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the positions that have draft KV."""
        running = self._engine.scheduler.running
        return tuple(request.id for request in running if slot in request.slots[: request.drafted])

    def view_of(self, batch: ForwardBatch) -> StepView:
        """A forward of the draft model; its tokens are one position after its entries."""
        device = batch.rows.device
        tokens = GroupTokens(
            prefix_lens=batch.prefix_lens,
            extend_lens=batch.extend_lens,
            token_starts=batch.token_starts,
            input_ids=batch.input_ids,
            positions=batch.positions,
            digests=to_device(self._prefix_digests(batch).numpy(), device),
            expected_ids=to_device(_expected(batch), device),
        )
        table = self._engine.runner.pool.req_to_token
        return StepView(
            request_ids=[request.id for request in batch.requests],
            rows=batch.rows,
            prefix_lens=batch.prefix_lens + 1,
            extend_lens=batch.extend_lens,
            token_starts=batch.token_starts,
            input_ids=batch.input_ids,
            positions=batch.positions + 1,
            digests=None,
            groups={DRAFT: GroupStep(slot_table=table, out_slots=batch.out_slots, tokens=tokens)},
        )

    def _prefix_digests(self, batch: ForwardBatch) -> Tensor:
        """int64 [n] on the CPU: chain over each request's entries before this forward, proposals included."""
        known = [
            min(prefix, request.computed)
            for request, prefix in zip(batch.requests, batch.prefixes, strict=True)
        ]
        digests = self._digests.advance(batch.requests, known)
        for index, (request, start, stop) in enumerate(
            zip(batch.requests, known, batch.prefixes, strict=True)
        ):
            if start < stop:
                proposed = torch.from_numpy(request.tokens[start + 1 : stop + 1])
                digests[index] += mix64(proposed, torch.arange(start, stop)).sum()
        return digests


def _expected(batch: ForwardBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """int64 [num_tokens] from the requests' own token lists, proposals included."""
    spans = zip(batch.requests, batch.prefixes, batch.extends, strict=True)
    return np.concatenate([r.tokens[a + 1 : a + n + 1] for r, a, n in spans], dtype=np.int64)
