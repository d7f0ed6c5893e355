"""The V2 model runner (vllm.v1.worker.gpu.model_runner): all request state lives on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_obs.engines.adapter import Observer
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.device_digests import DeviceDigests
from canary_obs.engines.vllm.seams import Seams
from canary_obs.views import GroupStep, StepView


class V2Adapter(VllmAdapter):
    """Takes the batch as `prepare_attn` returns it; the forward ends where `execute_model` does."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)
        self._digests = DeviceDigests(runner.max_num_reqs, runner.device)
        self._blocks: dict[str, tuple[list[int], ...]] = {}
        self._open: StepView | None = None

    def wrap_forward(self, seams: Seams, observer: Observer) -> None:
        """Both methods run outside captured graphs; dummy batches take `prepare_dummy_attn`."""

        def around_attention(original: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_attn(batch: Any) -> Any:
                prepared = original(batch)
                if self.output is not None:
                    self._open = self.guarded_view(observer, lambda: self._view(batch, *prepared))
                    if self._open is not None:
                        observer.before_forward(self._open)
                return prepared

            return prepare_attn

        def around_model(original: Callable[..., Any]) -> Callable[..., Any]:
            def execute_model(*given: Any, **named: Any) -> Any:
                try:
                    result = original(*given, **named)
                except BaseException:
                    self._close(observer.forward_failed)
                    raise
                self._close(observer.after_forward)
                return result

            return execute_model

        seams.wrap(self.runner, "prepare_attn", around_attention)
        seams.wrap(self.runner, "execute_model", around_model)

    def _close(self, report: Callable[[StepView], None]) -> None:
        view, self._open = self._open, None
        if view is not None:
            report(view)

    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """From the scheduler's outputs: the runner keeps block lists on the device only."""
        for request, blocks in list(self._blocks.items()):
            yield request, blocks[number]

    def requests_changed(self, output: Any) -> None:
        """Follow block lists; new requests start with the digest of what the scheduler says is cached."""
        ended = output.finished_req_ids | (output.preempted_req_ids or set())
        self._digests.forget(ended)
        for request in ended:
            self._blocks.pop(request, None)
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            self._digests.begin(new.req_id, new.prefill_token_ids[: new.num_computed_tokens])
        cached = output.scheduled_cached_reqs
        for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for known, ids in zip(self._blocks[request], blocks or (), strict=False):
                known.extend(ids)

    def _view(self, batch: Any, block_tables: Sequence[Tensor], slot_mappings: Tensor) -> StepView:
        states, count, total = self.runner.req_states, batch.num_reqs, batch.num_tokens
        index = batch.idx_mapping[:count].long()
        starts = batch.query_start_loc[: count + 1]
        prefix = states.num_computed_tokens.gpu[index]
        extend = starts[1:] - starts[:-1]
        digests = self._digests.advance(
            batch.req_ids[:count], index, states.all_token_ids.gpu, prefix, extend, batch.num_scheduled_tokens
        )
        return StepView(
            request_ids=list(batch.req_ids[:count]),
            rows=self._rows[:count],
            prefix_lens=prefix,
            extend_lens=extend,
            token_starts=starts,
            input_ids=batch.input_ids[:total],
            positions=batch.positions[:total],
            digests=digests,
            groups={
                group.view.name: GroupStep(
                    slot_table=block_tables[group.number], out_slots=slot_mappings[group.number, :total]
                )
                for group in self.found
            },
        )
