"""The V1 model runner (vllm.v1.worker.gpu_model_runner, and the CPU runner that inherits it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.toolkit.device_digests import InputDigests
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.token_digests import TokenDigests
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.device.backend import choose_backend


class V1Adapter(VllmAdapter):
    """Reads the runner's persistent input batch, whose order is the forward's."""

    def __init__(self, runner: Any, **options: Any) -> None:
        speculates = runner.speculative_config is not None
        corrects = getattr(runner, "use_async_spec_decode", False)
        if runner.use_async_scheduling and speculates and not corrects:
            raise UnsupportedEngine(
                "this vLLM's V1 model runner does not correct its counts on the device when asynchronous "
                "scheduling meets speculative decoding; use --no-async-scheduling, or the V2 model runner"
            )
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)
        super().__init__(runner, **options)
        # A copy of digests to a GPU would wait for it; rejected drafts are known on the host only.
        on_device = runner.use_async_scheduling or (runner.device.type == "cuda" and not speculates)
        drafts = runner.num_spec_tokens if speculates else 0
        self._fed = InputDigests(runner.max_num_reqs, runner.device, drafts) if on_device else None
        self._digests = TokenDigests(choose_backend("auto", torch.device("cpu")))
        self._of_tokens = self._fed or self._digests
        self._cut_at: tuple[int, ...] = ()  # the last view's requests, tokens, and addresses of its inputs
        self._cut: dict[str, Any] = {}

    @property
    def step_types(self) -> StepTypes:
        """Types of the forwards to come."""
        runner, table = self.runner, self.runner.input_batch.block_table[self.found[0].number]
        return StepTypes(
            slot_table=table.block_table.gpu.dtype,
            rows=self._rows.dtype,
            lengths=runner.query_start_loc.gpu.dtype,
            input_ids=runner.input_ids.gpu.dtype,
            positions=runner.positions.dtype,
            out_slots=table.slot_mapping.gpu.dtype,
            has_digests=True,
            expected_ids=None,
        )

    def compile(self) -> None:
        """A step of one request without tokens: compiles what the views launch. Forgets all requests."""
        if self._fed is not None:
            none, ids = np.zeros(1, dtype=np.int64), self.runner.input_ids.gpu
            nothing = torch.zeros(2, dtype=torch.int32, device=self.runner.device)
            self._fed.seat([""], none[:, None], none, none)
            self._fed.follow(ids, nothing, nothing[:1])
            self._fed.forget([""])
            return
        tokens, none = self.runner.input_batch.token_ids_cpu, np.zeros(1, dtype=np.int32)
        for requests in ([""], []):
            self._digests.advance(requests, tokens, none[: len(requests)])
        self._digests.forget([""])

    def wrap_forward(self, patches: MethodPatches, observer: Observer) -> None:
        """`_model_forward` lies outside captured graphs and runs for warm-up batches too.

        `_dummy_run`, of a data parallel replica without requests, writes where the last forward's inputs are.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def _model_forward(*given: Any, **named: Any) -> Any:
                if self.output is not None:
                    self.begin_forward(observer, lambda: self._view(*given, **named))
                return original(*given, **named)

            return _model_forward

        def joined(original: Callable[..., Any]) -> Callable[..., Any]:
            def _dummy_run(*given: Any, **named: Any) -> Any:
                self.side_stream.join()
                return original(*given, **named)

            return _dummy_run

        patches.wrap(self.runner, "_model_forward", make)
        patches.wrap(self.runner, "_dummy_run", joined)

    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """From the runner's request states."""
        for request, state in list(self.runner.requests.items()):
            yield request, state.block_ids[number]

    def requests_changed(self, output: Any) -> None:
        """Drop the digests of requests that ended, were resumed or come with new token lists."""
        if output.finished_req_ids:
            self._of_tokens.forget(output.finished_req_ids)
        if output.scheduled_new_reqs:
            self._of_tokens.forget(request.req_id for request in output.scheduled_new_reqs)
        if resumed := output.scheduled_cached_reqs.resumed_req_ids:
            self._of_tokens.forget(resumed)

    def _view(self, input_ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> StepView:
        runner, output = self.runner, self.output
        count, total = runner.input_batch.num_reqs, output.total_num_scheduled_tokens
        # Multimodal models get embeddings and positions of several axes; the runner keeps the plain ones too.
        ids = input_ids if input_ids is not None else runner.input_ids.gpu
        places = positions if positions is not None and positions.dim() == 1 else runner.positions
        # What was cut keeps its memory, so nothing else can come to lie at its address.
        cut_at = count, total, ids.data_ptr(), places.data_ptr()
        if cut_at != self._cut_at:
            inputs = {"input_ids": ids[:total], "positions": places[:total]}
            self._cut, self._cut_at = self._batch_columns(count, total) | inputs, cut_at
        return StepView(request_ids=(), digests=None, **self._cut)

    def complete(self, view: StepView) -> StepView:
        """With the ids of the batch and their digests."""
        requests = list(self.runner.input_batch.req_ids[: view.rows.shape[0]])
        return StepView(request_ids=requests, digests=self._prefix_digests(requests), **self._cut)

    def _batch_columns(self, count: int, total: int) -> dict[str, Any]:
        """What views of the runner's lasting tensors have in common while the batch keeps its size."""
        runner, tables = self.runner, self.runner.input_batch.block_table
        return {
            "rows": self._rows[:count],
            "prefix_lens": runner.num_computed_tokens[:count],
            "extend_lens": runner.num_scheduled_tokens.gpu[:count],
            "token_starts": runner.query_start_loc.gpu[: count + 1],
            "groups": {
                group.view.name: GroupStep(
                    slot_table=tables[group.number].block_table.gpu,
                    out_slots=tables[group.number].slot_mapping.gpu[:total],
                )
                for group in self.found
            },
        }

    def _prefix_digests(self, requests: list[str]) -> torch.Tensor:
        runner, count = self.runner, len(requests)
        tokens = runner.input_batch.token_ids_cpu
        ends = np.asarray(runner.input_batch.num_computed_tokens_cpu[:count])
        if self._fed is None:
            return self._digests.advance(requests, tokens, ends).to(runner.device, non_blocking=True)
        self._fed.seat(requests, tokens, ends, runner.num_scheduled_tokens.np[:count])
        starts = runner.query_start_loc.gpu[: count + 1]
        return self._fed.follow(runner.input_ids.gpu, starts, runner.num_computed_tokens[:count])
