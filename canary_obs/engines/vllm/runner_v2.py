"""The V2 model runner (vllm.v1.worker.gpu.model_runner): all request state lives on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from canary_kernels.digest import TokenLists
from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.toolkit.device_digests import ListDigests
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.request_changes import places_with_blocks
from canary_obs.engines.vllm.sharded_slots import ShardedSlots
from canary_obs.engines.vllm.states import StateSteps
from canary_obs.engines.vllm.step_hooks import StepHooks
from canary_obs.engines.vllm.versions import V2_VERSIONS

_MAX_COLUMNS = 512  # sizes of batches whose slices are kept


class V2Adapter(VllmAdapter):
    """Views are slices of the batch that `prepare_attn` is called with."""

    supported: ClassVar[tuple[str, ...]] = V2_VERSIONS
    completes_views = False

    def __init__(
        self, runner: Any, *, worker: Any = None, wrap_engine: Callable[[MethodPatches], None] | None = None,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)
        super().__init__(runner, worker=worker, wrap_engine=wrap_engine, fresh=fresh)
        self._digests = ListDigests(runner.max_num_reqs, runner.device)
        states = [group for group in self.vllm_groups if group.states]
        self._attended = [group for group in self.vllm_groups if group.of_tokens]
        sharded = [group for group in self._attended if group.sharding.ranks > 1]
        memory = runner.max_num_tokens, self.step_types, runner.device
        self._sharded = ShardedSlots(sharded, *memory) if sharded else None
        shape = runner.max_num_reqs, runner.device
        self._states = StateSteps(states, self.states, self.step_types, shape) if states else None
        self._blocks: dict[str, tuple[list[int], ...]] = {}
        self.requests.lists = self._blocks
        self._prepared: tuple[Any, ...] | None = None  # batch and tables of the forward that is next
        # What views of a batch's size have in common, by size and addresses of the runner's tensors.
        self._columns: dict[tuple[int, ...], dict[str, Any]] = {}
        self._shown: StepView | None = None  # the last view

    @property
    def step_types(self) -> StepTypes:
        """Types of the views to come."""
        buffers, tables = self.runner.input_buffers, self.runner.block_tables
        return StepTypes(
            slot_table=tables.input_block_tables[0].dtype,
            rows=self._rows.dtype,
            lengths=buffers.query_start_loc.dtype,
            input_ids=buffers.input_ids.dtype,
            positions=buffers.positions.dtype,
            out_slots=tables.slot_mappings.dtype,
            has_digests=True,
            expected_ids=None,
            has_known_tokens=True,
        )

    def warm_up(self) -> None:
        """Digest a batch of one request without tokens. Forgets all requests."""
        nothing = torch.zeros(2, dtype=torch.int32, device=self.runner.device)
        self.known_tokens.begin([""], nothing[:1])
        self.known_tokens.fill()
        self._digests.following(self._lists(1, nothing))()
        self._digests.memory.counts.zero_()

    def wrap_forward(self, patches: MethodPatches, hooks: StepHooks) -> None:
        """Both `prepare_attn` are outside captured graphs; dummy batches use `prepare_dummy_attn`."""

        def keep_tables(original: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_attn(batch: Any) -> Any:
                tables = original(batch)
                self._prepared = (batch, *tables)
                return tables

            return prepare_attn

        def begin_forward_after(original: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_attn(batch: Any, *args: Any, **kwargs: Any) -> Any:
                metadata = original(batch, *args, **kwargs)
                prepared, self._prepared = self._prepared, None
                if prepared is not None and hooks.output is not None:
                    given = metadata if batch is prepared[0] else None
                    hooks.begin_forward(partial(self._view, given, *prepared))
                return metadata

            return prepare_attn

        patches.wrap(self.runner, "prepare_attn", keep_tables)
        # With micro-batches it is called for each of them.
        patches.wrap(self.runner.model_state, "prepare_attn", begin_forward_after)
        hooks.reported_at_sampling = True
        if not self.inputs_persist and self._drafts is None:  # else wrapped where a draft model runs
            patches.wrap(self.runner, "sample_tokens", hooks.around_sample_tokens)
        if self.inputs_persist and self.runner.sampler is not None:
            # Sampling starts with the logits, one matrix product that is slower with other work next to it.
            # The step's last checks are launched after it, next to the many small kernels of sampling.
            patches.wrap(self.runner.model, "compute_logits", hooks.around_compute_logits)
            patches.wrap(self.runner, "sample_tokens", hooks.around_sample_tokens)

    def complete_view(self, view: StepView) -> StepView:
        """The view is complete when it is built: ids and digests are on the device."""
        return view

    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """From the scheduler's outputs: the runner keeps block lists on the device only."""
        for request, blocks in list(self._blocks.items()):
            yield request, blocks[number]

    def requests_running(self) -> int:
        """Those that have a row in the runner's states."""
        return len(self.runner.req_states.req_id_to_index)

    def update_requests(self, output: Any) -> None:
        """Follow block lists; restart the digests of new requests."""
        for request in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._blocks.pop(request, None)
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            self._digests.start_request(new.req_id)
        cached = output.scheduled_cached_reqs
        if cached.new_block_ids.count(None) == len(cached.new_block_ids):  # as in most decode steps
            return
        for place in places_with_blocks(cached):
            known = self._blocks.get(cached.req_ids[place], ())  # (): it began in an output that failed
            for ids, more in zip(known, cached.new_block_ids[place], strict=False):
                ids.extend(more)

    def _view(
        self, metadata: Any, batch: Any, block_tables: Sequence[Tensor], slot_mappings: Tensor
    ) -> StepView:
        count, total = batch.num_reqs, batch.num_tokens
        # The slices keep their tensors alive, so no other tensor can get the same address.
        key = (
            count, total, block_tables[0].shape[0], slot_mappings.data_ptr(), batch.input_ids.data_ptr(),
            batch.positions.data_ptr(), batch.query_start_loc.data_ptr(),
            *map(Tensor.data_ptr, block_tables),
        )  # fmt: skip
        columns = self._columns.get(key) or self._add_columns(key, batch, block_tables, slot_mappings)
        own, requests = columns["groups"], batch.req_ids[:count]
        if self._digests.started:
            self._digests.begin(self.runner.req_states.req_id_to_index)
        self.known_tokens.begin(requests, batch.idx_mapping)
        states = self._states if self.states.shown else None
        # What drafting and states read, too, is launched before the canary's own checks.
        at_once = states is not None or not self.inputs_persist
        if at_once:
            self.known_tokens.fill()
            columns["launches"].before_write()
        given = self._attention.given(metadata, None, own, total)
        groups = given
        if self._sharded is not None:
            groups = self._sharded.steps(given, columns["positions"], columns["token_starts"])
        if states is not None:
            lens = columns["prefix_lens"], columns["extend_lens"]
            groups = {**groups, **states.steps(requests, dict(enumerate(block_tables)), *lens)}
        shown = self._shown
        if shown is not None and shown.groups is groups and shown.request_ids == requests:
            return shown
        launches, known = None if at_once else columns["launches"], self.known_tokens.columns(count)
        self._shown = shown = StepView(
            request_ids=requests, known_lens=known.lens, known_digests=known.digests,
            **(columns | {"groups": groups, "launches": launches}),
        )  # fmt: skip
        return shown

    def _add_columns(
        self, key: tuple[int, ...], batch: Any, block_tables: Sequence[Tensor], slot_mappings: Tensor
    ) -> dict[str, Any]:
        count, total, memory = batch.num_reqs, batch.num_tokens, self._digests.memory
        groups = {
            group.view.name: GroupStep(
                slot_table=block_tables[group.number], out_slots=slot_mappings[group.number, :total]
            )
            for group in self._attended
        }
        if len(self._columns) >= _MAX_COLUMNS:
            self._columns.clear()
        starts = batch.query_start_loc[: count + 1]
        launch = self._digests.following(self._lists(count, starts))
        self._columns[key] = columns = {
            "rows": self._rows[:count],
            "prefix_lens": memory.prefix_lens[:count],
            "extend_lens": memory.extend_lens[:count],
            "token_starts": starts,
            "input_ids": batch.input_ids[:total],
            "positions": batch.positions[:total],
            "digests": memory.digests[:count],
            "groups": groups,
            "launches": self.known_tokens.launches(before_write=launch),
        }
        return columns

    def _lists(self, count: int, starts: Tensor) -> TokenLists:
        states = self.runner.req_states
        return TokenLists(
            rows=self.known_tokens.rows[:count],
            tokens=states.all_token_ids.gpu,
            computed=states.num_computed_tokens.gpu,
            token_starts=starts,
        )
