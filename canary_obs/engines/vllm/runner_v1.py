"""The V1 model runner (vllm.v1.worker.gpu_model_runner, and the CPU runner that inherits it)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.toolkit.device_digests import InputDigests
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.token_digests import TokenDigests
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.entry_steps import EntrySteps, HostBatch
from canary_obs.engines.vllm.sharded_slots import ShardedSlots
from canary_obs.engines.vllm.states import StateSteps
from canary_obs.engines.vllm.step_hooks import StepHooks
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.device.backend import choose_backend

_MAX_COLUMNS = 512  # sizes of batches whose slices are kept


class V1Adapter(VllmAdapter):
    """Views are slices of the runner's persistent input tensors, in the order of its input batch."""

    def __init__(
        self, runner: Any, *, worker: Any = None, wrap_engine: Callable[[MethodPatches], None] | None = None,
        fresh: bool = False,
    ) -> None:  # fmt: skip
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
        super().__init__(runner, worker=worker, wrap_engine=wrap_engine, fresh=fresh)
        # Digests from host lists would have to be copied to the GPU, which waits. Without asynchronous
        # scheduling only the host knows which drafts were rejected.
        on_device = runner.use_async_scheduling or (runner.device.type == "cuda" and not speculates)
        drafts = runner.num_spec_tokens if speculates else 0
        self._input_digests = InputDigests(runner.max_num_reqs, runner.device, drafts) if on_device else None
        self._token_digests = TokenDigests(choose_backend("auto", torch.device("cpu")))
        self._digests = self._input_digests or self._token_digests
        states = [group for group in self.vllm_groups if group.states]
        self._attended = [group for group in self.vllm_groups if group.of_tokens]
        entries = [group for group in self.vllm_groups if group.entry_tokens > 1]
        self._entries = EntrySteps(entries, self.step_types) if entries else None
        sharded = [group for group in self._attended if group.sharding.ranks > 1]
        memory = runner.max_num_tokens, self.step_types, runner.device
        self._sharded = ShardedSlots(sharded, *memory) if sharded else None
        shape = runner.max_num_reqs, runner.device
        self._states = StateSteps(states, self.states, self.step_types, shape) if states else None
        # The last view's fields; and those of all sizes of batches, by what they depend on: requests, tokens,
        # addresses of the input tensors.
        self._columns: dict[str, Any] = {}
        self._sizes: dict[tuple[int, ...], dict[str, Any]] = {}
        self._sizes_of: Any = None  # the runner's input batch that they are of
        # The last view and its fields: a batch that repeats is shown as the same one.
        self._shown: tuple[dict[str, Any], StepView] | None = None
        self._completed: tuple[StepView, StepView] | None = None  # the last one with digests of the host

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
        self.known_tokens.begin([""])
        self.known_tokens.fill()
        if self._input_digests is not None:
            none, ids = np.zeros(1, dtype=np.int64), self.runner.input_ids.gpu
            nothing = torch.zeros(2, dtype=torch.int32, device=self.runner.device)
            self._input_digests.set_batch([""], none[:, None], none, none)
            self._input_digests.following(1, ids, nothing, nothing[:1])[0]()
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
                    hooks.begin_forward(partial(self._view, total, *args, **kwargs))
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
            self._forget(output.finished_req_ids)
        if output.scheduled_new_reqs:
            self._forget([request.req_id for request in output.scheduled_new_reqs])
        if resumed := output.scheduled_cached_reqs.resumed_req_ids:
            self._forget(resumed)

    def _forget(self, requests: Collection[str]) -> None:
        self._digests.forget(requests)
        if self._entries is not None:
            self._entries.forget(requests)

    def _view(self, total: int, input_ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> StepView:
        runner = self.runner
        batch = runner.input_batch
        count = batch.num_reqs
        if batch is not self._sizes_of:
            self._sizes.clear()
            self._sizes_of = batch
        # Multimodal models get embeddings and positions of several axes; the runner keeps the plain ones too.
        ids = input_ids if input_ids is not None else runner.input_ids.gpu
        places = positions if positions is not None and positions.dim() == 1 else runner.positions
        # The slices keep their tensors alive, so no other tensor can get the same address.
        key = count, total, ids.data_ptr(), places.data_ptr()
        columns = self._sizes.get(key)
        if columns is None:
            if len(self._sizes) >= _MAX_COLUMNS:
                self._sizes.clear()
            inputs = {"input_ids": ids[:total], "positions": places[:total]}
            columns = self._sizes[key] = self._batch_columns(count, total) | inputs
        self._columns = columns
        if self._states is not None and self.states.shown:
            self._columns = self._columns | {"groups": self._columns["groups"] | self._state_steps(count)}
        context = self._forward_context()
        if self._entries is not None:
            steps = self._entry_steps(self._entries, ids, count, total, context.attn_metadata)
            self._columns = self._columns | {"groups": self._columns["groups"] | steps}
        own = self._columns["groups"]
        mappings = getattr(context, "slot_mapping", None)  # not in all versions
        given = self._attention.given(context.attn_metadata, mappings, own, total)
        groups = given
        if self._sharded is not None:
            groups = self._sharded.steps(given, self._columns["positions"], self._columns["token_starts"])
        if groups is not own:  # in this forward
            self._columns = self._columns | {"groups": groups}
        requests = batch.req_ids[:count]
        self.known_tokens.begin(requests)
        shown = self._shown
        if shown is None or shown[0] is not self._columns or shown[1].request_ids != requests:
            # Drafting, which comes next, reads what the view has: then all of it is launched at once.
            launches = self._columns["launches"] if self.inputs_persist else None
            known, columns = self.known_tokens.columns(count), self._columns | {"launches": launches}
            view = StepView(
                request_ids=requests, known_lens=known.lens, known_digests=known.digests, **columns
            )  # fmt: skip
            self._shown = shown = self._columns, view
        return shown[1]

    def complete_view(self, view: StepView) -> StepView:
        """Adds digests, where the host computes them."""
        runner, requests = self.runner, list(view.request_ids)
        tokens = runner.input_batch.token_ids_cpu
        ends = np.asarray(runner.input_batch.num_computed_tokens_cpu[: len(requests)])
        launches = self._columns["launches"]
        if self._input_digests is not None:
            scheduled = runner.num_scheduled_tokens.np[: len(requests)]
            self._input_digests.set_batch(requests, tokens, ends, scheduled)
            launches.due = True
        else:
            digests = self._token_digests.advance(requests, tokens, ends)
            digests = digests.to(runner.device, non_blocking=True)
            last = self._completed
            if last is None or last[0] is not view or last[1].digests is not digests:
                self._completed = last = view, replace(view, digests=digests)
            view = last[1]
        if view.launches is None:
            self.known_tokens.fill()
            launches.launch_head()
        return view

    def _batch_columns(self, count: int, total: int) -> dict[str, Any]:
        """Fields of views that stay the same as long as the batch keeps its size."""
        runner, tables = self.runner, self.runner.input_batch.block_table
        starts, lens = runner.query_start_loc.gpu[: count + 1], runner.num_computed_tokens[:count]
        launch, digests = None, None
        if self._input_digests is not None:
            given = runner.input_ids.gpu, starts, lens
            launch, digests = self._input_digests.following(count, *given)
        return {
            "digests": digests,
            "launches": self.known_tokens.launches(head=launch),
            "rows": self._rows[:count],
            "prefix_lens": lens,
            "extend_lens": runner.num_scheduled_tokens.gpu[:count],
            "token_starts": starts,
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
        requests, ends = runner.input_batch.req_ids[:count], runner.num_scheduled_tokens.gpu[:count]
        return self._states.steps(requests, by_number, runner.num_computed_tokens[:count], ends)

    def _entry_steps(
        self, entries: EntrySteps, ids: Tensor, count: int, total: int, metadata: Any
    ) -> dict[str, GroupStep]:
        runner, tables = self.runner, self.runner.input_batch.block_table
        before = runner.input_batch.num_computed_tokens_cpu[:count].astype(np.int64)
        batch = HostBatch(
            requests=runner.input_batch.req_ids[:count],
            tokens=runner.input_batch.token_ids_cpu,
            before=before,
            after=before + runner.num_scheduled_tokens.np[:count],
            input_ids=ids[:total].numpy(),
        )
        by_number = {group.number: tables[group.number].block_table.gpu for group in self.vllm_groups}
        return entries.steps(batch, by_number, self._attention.entry_mappings(metadata, total))
