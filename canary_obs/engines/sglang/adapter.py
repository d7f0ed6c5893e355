"""EngineAdapter of an SGLang scheduler and the model runner of its worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_obs.copy_records.draft_trees import DraftTrees
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupView, KVAllocation, StepTypes, WindowTokens
from canary_obs.engines.sglang.allocation import kv_allocation
from canary_obs.engines.sglang.batch_views import BatchViews
from canary_obs.engines.sglang.device_views import DeviceViews
from canary_obs.engines.sglang.disaggregation import TransferHooks
from canary_obs.engines.sglang.freed_slots import freed_slots
from canary_obs.engines.sglang.groups import FULL, SWA, pools_by_group
from canary_obs.engines.sglang.hierarchical_cache import HierarchicalCache
from canary_obs.engines.sglang.host_tier import HostTier, host_controller
from canary_obs.engines.sglang.limits import check_scheduler
from canary_obs.engines.sglang.physical_slots import covers_last, is_unified, physical_slots
from canary_obs.engines.sglang.prefix_hits import PrefixHits
from canary_obs.engines.sglang.prefix_tree import PrefixTree
from canary_obs.engines.sglang.request_rows import row_of
from canary_obs.engines.sglang.request_traces import RequestTraces
from canary_obs.engines.sglang.retracted_copies import RetractedCopies
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.sglang.speculation import (
    Speculation,
    draft_runners,
    drafted_tokens,
    drafts_left_out,
    drafts_trees,
)
from canary_obs.engines.sglang.spliced_buffers import draft_groups, found_groups
from canary_obs.engines.sglang.state_hooks import StateHooks
from canary_obs.engines.sglang.states import STATE, slot_of
from canary_obs.engines.sglang.step_hooks import StepHooks
from canary_obs.engines.sglang.stream_hooks import StreamHooks, streams_of
from canary_obs.engines.sglang.transfer_order import StreamOrder, TransferOrder
from canary_obs.engines.sglang.trees import prefix_tree
from canary_obs.engines.sglang.unified_memory import UnifiedMemory
from canary_obs.engines.sglang.untried import ROLES, untried_on_gpus, untried_pair
from canary_obs.engines.sglang.versions import check_hooks, check_version, installed_version
from canary_obs.engines.sglang.window_count import WindowCount
from canary_obs.engines.sglang.window_slots import WindowSlots
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.model_label import model_label
from canary_obs.errors import UnsupportedEngine


class SglangAdapter(EngineAdapter):
    """Sets attributes of the scheduler, its model runner and its allocator; detach deletes them.

    StepHooks, created at attach, calls the observer.
    """

    name = "sglang"

    def __init__(self, scheduler: Any) -> None:
        """Raises UnsupportedEngine for what is not covered; no forward may run meanwhile."""
        self.version = installed_version()
        check_version(self.version)
        check_hooks(self.version)
        check_scheduler(scheduler, self.version)
        self.scheduler, self.runner = scheduler, scheduler.tp_worker.model_runner
        self._device = self.runner.req_to_token_pool.req_to_token.device
        # On a GPU the checks run next to the engine, of tensors that SGLang does not change meanwhile.
        self._concurrent = concurrent(self._device)
        given = settings_of(scheduler), self.runner.token_to_kv_pool
        self.untried = untried_pair(*given)
        if self._concurrent:
            self.untried = self.untried or untried_on_gpus(*given, scheduler.tree_cache)
        runners = self.runner, *draft_runners(scheduler)
        if "run_batch" in vars(scheduler) or any("forward" in vars(runner) for runner in runners):
            raise UnsupportedEngine(
                "this scheduler is wrapped already, by another canary (KV_CANARY_MODE makes the plugin "
                "attach one) or another tool; detach that first"
            )
        # The buffers were created in inference mode, and cannot be written to outside of it.
        with torch.inference_mode():
            self._found = found_groups(scheduler)
            target = self._found.covered
            self.sglang_groups = (*target, *(() if self._concurrent else draft_groups(scheduler)))
        if self._concurrent and (missing := drafts_left_out(scheduler)):
            self._found = replace(self._found, left_out=(*self._found.left_out, *missing))
        self._by_name = {group.view.name: group for group in self.sglang_groups}
        # Slots of a draft model, and of an indexer, are those of the request table, and are freed with them.
        self._freed = freed_slots(self.sglang_groups)
        apart = {
            name: group.own_slots for name, group in self._by_name.items() if group.own_slots is not None
        }
        self._scheduler_stream, cache = ForwardStream(self._device), scheduler.tree_cache
        where = self._device, self._scheduler_stream
        self._tree = prefix_tree(cache, self.sglang_groups, self._freed, apart, *where)
        self._trees: DraftTrees | None = None
        if drafts_trees(settings_of(scheduler)):
            table = self.runner.req_to_token_pool.req_to_token
            own = {group.view.name: group.own_slots for group in target}
            self._trees = DraftTrees(own, table, self._by_name[FULL].view.num_slots)
        self._views: BatchViews = (
            DeviceViews(self.runner, target, drafts=drafted_tokens(given[0]))
            if self._concurrent
            else BatchViews(self.runner, target, self._trees)
        )
        self._window_count: WindowCount | None = None
        if self._concurrent and isinstance(windows := apart.get(SWA), WindowSlots):
            full = self._by_name[FULL].allocator
            self._window_count = WindowCount(windows.mapping, full, self._scheduler_stream)
        self._patches = MethodPatches()
        self._hooks: StepHooks | None = None
        self.host_tier: HostTier | HierarchicalCache | None = None
        self.transfer: TransferHooks | None = None  # of a server that prefills or decodes only
        self.retracted: RetractedCopies | None = None
        self._hits = PrefixHits(self.runner, self.sglang_groups)
        self._totals = 0, 0  # empty batches and requests, before detach
        self._traces = RequestTraces()

    def traceparent(self, request: str) -> str | None:
        """From SGLang's own trace of it."""
        return self._traces.get(request)

    def model(self) -> str | None:
        """Path and revision among the scheduler's arguments."""
        arguments = self.scheduler.server_args
        return model_label(getattr(arguments, "model_path", None), getattr(arguments, "revision", None))

    @property
    def groups(self) -> Sequence[GroupView]:
        """One of all layers, or one of the layers with a sliding window and one of the others."""
        return [group.view for group in self.sglang_groups]

    @property
    def prefix_cache(self) -> PrefixTree:
        """SGLang's radix tree."""
        return self._tree

    @property
    def step_types(self) -> StepTypes:
        """Types of the views to come."""
        return self._views.step_types

    def slots_in_use(self, group: str) -> Tensor:
        """By the allocator's list of free pages."""
        live, ratio = self._freed[group].live(), self._by_name[group].ratio
        return live if ratio == 1 else live[live % ratio == ratio - 1] // ratio

    def foreign_slots(self, group: str) -> Tensor | None:
        """Of unified memory, those without a virtual number."""
        return self._freed[group].foreign()

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Requests with the slot in their row of the request table."""
        table, own = self.runner.req_to_token_pool.req_to_token, self._by_name[group].own_slots
        found, ratio = [], self._by_name[group].ratio
        for request in self._requests():
            if self._by_name[group].by_row is not None:
                state = torch.tensor([slot_of(request)])
                if int((state if own is None else own[state])[0]) == slot:
                    found.append(str(request.rid))
                continue
            slots = table[row_of(request), ratio - 1 : request.kv.kv_allocated_len : ratio] // ratio
            if bool(((slots if own is None else own[slots]) == slot).any()):
                found.append(str(request.rid))
        return tuple(found)

    def allocation(self) -> KVAllocation:
        """From the pool's report of its size, and the model's configuration."""
        return kv_allocation(self.runner, self._found, draft_runners(self.scheduler), self._by_name)

    def forwards(self) -> dict[str, int]:
        """By the scheduler's own number of its batches, without those that have no tokens."""
        empty, _ = self._counted
        counts = dict.fromkeys(self._by_name, int(self.scheduler.forward_ct) - empty)
        if self._trees is not None:  # the accepted path of a batch of trees is shown after them
            for name in self._trees.groups:
                counts[name] += self._trees.paths
        counts |= {STATE: self._views.state_forwards(counts[STATE])} if STATE in counts else {}
        return counts

    def requests_scheduled(self) -> int:
        """By the batches that the scheduler ran."""
        return self._counted[1]

    def prefix_hits(self) -> dict[str, int]:
        """By the scheduler's count when it admits requests."""
        return self._hits.counted

    def window_tokens(self) -> WindowTokens | None:
        """Live tokens by the allocators' free pages and the mapping between their slots."""
        if SWA not in self._by_name:
            return None
        if self._window_count is not None:
            hooks = self._hooks
            return self._window_count.newest(wait=hooks is None or not hooks.under_way)
        own, physical = self._by_name[SWA].own_slots, physical_slots(self._by_name[FULL])
        assert own is not None
        if physical is None:
            windowed = own[full := self._freed[FULL].live()]
        else:
            full, windowed = physical[virtual := physical.all_virtual()], own[virtual]
        lost, diverging = windowed == 0, (windowed > 0) & (windowed != full)
        counts = {"out_of_window": int(lost.sum()), "diverging": int(diverging.sum())}
        return WindowTokens(full=(FULL,), windowed=(SWA,), **counts)

    def reserve_scratch_slot(self) -> tuple[str, int]:
        """A slot of page 0, which takes the writes of padded tokens: the first slot only, by SGLang."""
        size, pool = int(self._by_name[FULL].allocator.page_size), self.runner.token_to_kv_pool
        # In unified memory the first slot of the other layers, or of states, lies there, too.
        if size > 1 and not (is_unified(pool) and covers_last(pool, size)):
            return FULL, size - 1
        raise UnsupportedEngine(
            f"with page_size {size} this SGLang has no slot that nobody uses: drills need a larger one"
        )

    def attach(self, observer: Observer) -> None:
        """Set attributes of the instances, and look whether the engine will find them."""
        controller = host_controller(self.scheduler)
        hits = self._hits if observer.compares_hits else None
        if hits is not None:
            hits.wrap(self._patches, self.scheduler, observer)
        if self._concurrent:
            streams = streams_of(self._device, self._scheduler_stream)
            assert isinstance(self._views, DeviceViews)
            self._hooks = checks = StreamHooks(self.scheduler, self._views, observer, streams, hits)
            order: TransferOrder = StreamOrder(checks, self._device)
            if controller is not None:
                self.host_tier = HierarchicalCache(controller, observer, checks, self._device)
                checks.arrive = self.host_tier.arrive
        else:
            if controller is not None:
                pools = pools_by_group(self.runner, draft_runners(self.scheduler))
                self.host_tier = HostTier(controller, pools, observer)
            speculation = None
            if settings_of(self.scheduler).speculative_algorithm is not None:
                speculation = Speculation(self.scheduler, observer, self._trees, self._views)
                speculation.wrap(self._patches)
            self._hooks = StepHooks(self.scheduler, self._views, observer, speculation=speculation, hits=hits)
            order = TransferOrder()
        hooks = self._hooks
        hooks.empty_batches, hooks.requests = self._totals
        for freed in dict.fromkeys(self._freed.values()):
            freed.wrap(self._patches, self.scheduler.tree_cache)
        self._traces.wrap(self._patches, self.scheduler, observer)
        if self.host_tier is not None:
            self.host_tier.wrap(self._patches)
            self.record_bytes = self.host_tier.device_bytes
        if is_unified(self.runner.token_to_kv_pool):
            UnifiedMemory(pools_by_group(self.runner), self._freed, observer).wrap(self._patches)
        if (role := settings_of(self.scheduler).disaggregation_mode) in ROLES:
            given = self._by_name, observer, order
            self.transfer = TransferHooks(self.scheduler, *given)
            self.retracted = RetractedCopies(self.runner.token_to_kv_pool_allocator, *given)
            for followed in (self.transfer, self.retracted):
                followed.wrap(self._patches)
            hooks.ran = order.ran if role == "prefill" else None
        self._patches.wrap(self.runner, "forward", hooks.around_forward)
        if STATE in self._by_name:
            StateHooks(self.runner, observer, hooks, self._views).wrap(self._patches)
        self._patches.wrap(self.scheduler, "run_batch", hooks.around_run_batch)
        self._patches.wrap(self.scheduler, "on_idle", hooks.around_on_idle)

    def detach(self) -> None:
        """Delete what attach has set; idempotent."""
        self._totals = self._counted
        hooks, self._hooks = self._hooks, None
        self.host_tier = self.transfer = self.retracted = None
        self._patches.restore()
        if hooks is not None:
            hooks.stop()

    def in_step(self) -> bool:
        """Whether the scheduler runs a batch, or the device what it launched."""
        hooks = self._hooks
        return hooks is not None and hooks.under_way

    @property
    def _counted(self) -> tuple[int, int]:
        hooks = self._hooks
        return self._totals if hooks is None else (hooks.empty_batches, hooks.requests)

    def _requests(self) -> Iterator[Any]:
        scheduler, seen = self.scheduler, set[int]()
        # With a pipeline, each of its micro-batches has requests of its own.
        batches = (scheduler.running_batch, scheduler.last_batch, *getattr(scheduler, "running_mbs", ()))
        running = [request for batch in batches if batch is not None for request in batch.reqs]
        for request in (*running, scheduler.chunked_req):
            if request is not None and row_of(request) is not None and id(request) not in seen:
                seen.add(id(request))
                yield request


def concurrent(device: torch.device) -> bool:
    """Whether forwards on this device go on after their launch."""
    return device.type == "cuda"
