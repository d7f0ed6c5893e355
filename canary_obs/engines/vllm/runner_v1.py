"""The V1 model runner (vllm.v1.worker.gpu_model_runner, and the CPU runner that inherits it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.toolkit.device_digests import InputDigests
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.token_digests import TokenDigests
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.states import StateSteps
from canary_obs.engines.vllm.step_hooks import StepHooks
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.device.backend import choose_backend


class V1Adapter(VllmAdapter):
    """Views are slices of the runner's persistent input tensors, in the order of its input batch."""

    def __init__(self, runner: Any, **options: Any) -> None:
        speculates = runner.speculative_config is not None
        corrects = getattr(runner, "use_async_spec_decode", False)
        if runner.use_async_scheduling and speculates and not corrects:
            raise UnsupportedEngine(
                "this vLLM's V1 model runner does not correct its counts on the device when asynchronous "
                "scheduling meets speculative decoding; use --no-async-scheduling, or the V2 model runner"
            )
        from vllm.forward_context import get_forward_context

        self._forward_context = get_forward_context
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)
        super().__init__(runner, **options)
        # Digests from host lists would have to be copied to the GPU, which waits. Without asynchronous
        # scheduling only the host knows which drafts were rejected.
        on_device = runner.use_async_scheduling or (runner.device.type == "cuda" and not speculates)
        drafts = runner.num_spec_tokens if speculates else 0
        self._input_digests = InputDigests(runner.max_num_reqs, runner.device, drafts) if on_device else None
        self._token_digests = TokenDigests(choose_backend("auto", torch.device("cpu")))
        self._digests = self._input_digests or self._token_digests
        states = [group for group in self.vllm_groups if group.states]
        self._attended = [group for group in self.vllm_groups if not group.states]
        self._states = (
            StateSteps(states, runner.max_num_reqs, self.step_types, runner.device) if states else None
        )
        # The last view's fields, and what they depend on: requests, tokens, addresses of the input tensors.
        self._columns: dict[str, Any] = {}
        self._columns_key: tuple[int, ...] = ()
        # The last view as it is built and as it was completed: a batch that repeats is shown as the same one.
        self._begun: tuple[dict[str, Any], StepView] | None = None
        self._shown: tuple[dict[str, Any], StepView] | None = None

    @property
    def step_types(self) -> StepTypes:
        """Types of the views to come."""
        runner, table = self.runner, self.runner.input_batch.block_table[self.vllm_groups[0].number]
        return StepTypes(
            slot_table=table.block_table.gpu.dtype,
            rows=self._rows.dtype,
            lengths=runner.query_start_loc.gpu.dtype,
            input_ids=runner.input_ids.gpu.dtype,
            positions=runner.positions.dtype,
            out_slots=table.slot_mapping.gpu.dtype,
            has_digests=True,
            expected_ids=None,
            has_known_tokens=True,
        )

    def warm_up(self) -> None:
        """Digest a batch of one request without tokens. Forgets all requests."""
        if self._input_digests is not None:
            none, ids = np.zeros(1, dtype=np.int64), self.runner.input_ids.gpu
            nothing = torch.zeros(2, dtype=torch.int32, device=self.runner.device)
            self._input_digests.set_batch([""], none[:, None], none, none)
            self._input_digests.advance(ids, nothing, nothing[:1])
            self._input_digests.forget([""])
            return
        tokens, none = self.runner.input_batch.token_ids_cpu, np.zeros(1, dtype=np.int32)
        for requests in ([""], []):
            self._token_digests.advance(requests, tokens, none[: len(requests)])
        self._token_digests.forget([""])

    def wrap_forward(self, patches: MethodPatches, hooks: StepHooks) -> None:
        """`_model_forward` is outside captured graphs; it also runs for warm-up batches, without an output.

        `_dummy_run`, for a data-parallel replica without requests, overwrites the last forward's inputs.
        """

        def begin_forward_before(original: Callable[..., Any]) -> Callable[..., Any]:
            def _model_forward(*args: Any, **kwargs: Any) -> Any:
                if (output := hooks.output) is not None:
                    total = output.total_num_scheduled_tokens
                    hooks.begin_forward(lambda: self._view(total, *args, **kwargs))
                return original(*args, **kwargs)

            return _model_forward

        def join_before(original: Callable[..., Any]) -> Callable[..., Any]:
            def _dummy_run(*args: Any, **kwargs: Any) -> Any:
                hooks.side_stream.join()
                return original(*args, **kwargs)

            return _dummy_run

        patches.wrap(self.runner, "_model_forward", begin_forward_before)
        patches.wrap(self.runner, "_dummy_run", join_before)

    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """From the states of the runner's requests."""
        for request, state in list(self.runner.requests.items()):
            yield request, state.block_ids[number]

    def requests_running(self) -> int:
        """Those that the runner has states of."""
        return len(self.runner.requests)

    def update_requests(self, output: Any) -> None:
        """Drop the digests of requests that ended, resumed, or have new token lists."""
        if output.finished_req_ids:
            self._digests.forget(output.finished_req_ids)
        if output.scheduled_new_reqs:
            self._digests.forget(request.req_id for request in output.scheduled_new_reqs)
        if resumed := output.scheduled_cached_reqs.resumed_req_ids:
            self._digests.forget(resumed)

    def _view(self, total: int, input_ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> StepView:
        runner = self.runner
        count = runner.input_batch.num_reqs
        # Multimodal models get embeddings and positions of several axes; the runner keeps the plain ones too.
        ids = input_ids if input_ids is not None else runner.input_ids.gpu
        places = positions if positions is not None and positions.dim() == 1 else runner.positions
        # The slices keep their tensors alive, so no other tensor can get the same address.
        key = count, total, ids.data_ptr(), places.data_ptr()
        if key != self._columns_key:
            inputs = {"input_ids": ids[:total], "positions": places[:total]}
            self._columns, self._columns_key = self._batch_columns(count, total) | inputs, key
        if self._states is not None:
            self._columns = self._columns | {"groups": self._columns["groups"] | self._state_steps(count)}
        context, own = self._forward_context(), self._columns["groups"]
        mappings = getattr(context, "slot_mapping", None)  # not in all versions
        groups = self._attention.given(context.attn_metadata, mappings, own, total)
        if groups is not own:  # in this forward
            self._columns, self._columns_key = self._columns | {"groups": groups}, ()
        if self._begun is None or self._begun[0] is not self._columns:
            self._begun = self._columns, StepView(request_ids=(), digests=None, **self._columns)
        return self._begun[1]

    def complete_view(self, view: StepView) -> StepView:
        """Adds request ids, digests and what the scheduler knows."""
        requests = list(self.runner.input_batch.req_ids[: view.rows.shape[0]])
        known, digests = self.known_tokens.columns(requests), self._prefix_digests(requests)
        if self._shown is not None and self._shown[0] is self._columns:
            shown = self._shown[1]
            if shown.digests is digests and shown.request_ids == requests:
                return shown
        complete = StepView(
            request_ids=requests, digests=digests, known_lens=known.lens, known_digests=known.digests,
            **self._columns,
        )  # fmt: skip
        self._shown = self._columns, complete
        return complete

    def _batch_columns(self, count: int, total: int) -> dict[str, Any]:
        """Fields of views that stay the same as long as the batch keeps its size."""
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
                for group in self._attended
            },
        }

    def _state_steps(self, count: int) -> dict[str, GroupStep]:
        runner, tables = self.runner, self.runner.input_batch.block_table
        assert self._states is not None
        by_number = {group.number: tables[group.number].block_table.gpu for group in self.vllm_groups}
        return self._states.steps(
            by_number, runner.num_computed_tokens[:count], runner.num_scheduled_tokens.gpu[:count]
        )

    def _prefix_digests(self, requests: list[str]) -> torch.Tensor:
        runner, count = self.runner, len(requests)
        tokens = runner.input_batch.token_ids_cpu
        ends = np.asarray(runner.input_batch.num_computed_tokens_cpu[:count])
        if self._input_digests is None:
            return self._token_digests.advance(requests, tokens, ends).to(runner.device, non_blocking=True)
        self._input_digests.set_batch(requests, tokens, ends, runner.num_scheduled_tokens.np[:count])
        columns = self._columns
        return self._input_digests.advance(
            runner.input_ids.gpu, columns["token_starts"], columns["prefix_lens"]
        )
