"""The V1 model runner (vllm.v1.worker.gpu_model_runner, and the CPU runner that inherits it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from canary_obs.engines.adapter import Observer
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.digests import TokenDigests
from canary_obs.engines.vllm.seams import Seams
from canary_obs.errors import UnsupportedEngine
from canary_obs.views import GroupStep, StepView


class V1Adapter(VllmAdapter):
    """Reads the runner's persistent input batch, whose order is the forward's."""

    def __init__(self, runner: Any) -> None:
        if runner.use_async_scheduling:
            raise UnsupportedEngine(
                "vLLM's V1 model runner with asynchronous scheduling keeps the newest token ids on the "
                "device only; use --no-async-scheduling, or the V2 model runner"
            )
        super().__init__(runner)
        self._digests = TokenDigests()
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)

    def wrap_forward(self, seams: Seams, observer: Observer) -> None:
        """`_model_forward` lies outside captured graphs and runs for warm-up batches too."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def _model_forward(*given: Any, **named: Any) -> Any:
                if self.output is None:
                    return original(*given, **named)
                view = self.guarded_view(observer, lambda: self._view(*given, **named))
                if view is None:
                    return original(*given, **named)
                observer.before_forward(view)
                try:
                    result = original(*given, **named)
                except BaseException:
                    observer.forward_failed(view)
                    raise
                observer.after_forward(view)
                return result

            return _model_forward

        seams.wrap(self.runner, "_model_forward", make)

    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """From the runner's request states."""
        for request, state in list(self.runner.requests.items()):
            yield request, state.block_ids[number]

    def requests_changed(self, output: Any) -> None:
        """Drop the digests of requests that ended or come with new token lists."""
        if output.finished_req_ids:
            self._digests.forget(output.finished_req_ids)
        if output.scheduled_new_reqs:
            self._digests.forget(request.req_id for request in output.scheduled_new_reqs)

    def _view(self, input_ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> StepView:
        runner, output = self.runner, self.output
        batch = runner.input_batch
        count = batch.num_reqs
        requests = list(batch.req_ids[:count])
        total = output.total_num_scheduled_tokens
        # Multimodal models get embeddings and positions of several axes; the runner keeps the plain ones too.
        ids = input_ids if input_ids is not None else runner.input_ids.gpu
        places = positions if positions is not None and positions.dim() == 1 else runner.positions
        return StepView(
            request_ids=requests,
            rows=self._rows[:count],
            prefix_lens=runner.num_computed_tokens[:count],
            extend_lens=runner.num_scheduled_tokens.gpu[:count],
            token_starts=runner.query_start_loc.gpu[: count + 1],
            input_ids=ids[:total],
            positions=places[:total],
            digests=self._prefix_digests(requests),
            groups={
                group.view.name: GroupStep(
                    slot_table=batch.block_table[group.number].block_table.gpu,
                    out_slots=batch.block_table[group.number].slot_mapping.gpu[:total],
                )
                for group in self.found
            },
        )

    def _prefix_digests(self, requests: list[str]) -> torch.Tensor:
        batch = self.runner.input_batch
        ends = np.asarray(batch.num_computed_tokens_cpu[: len(requests)])
        return self._digests.advance(requests, batch.token_ids_cpu, ends).to(self.runner.device)
