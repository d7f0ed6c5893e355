"""EngineAdapter of a vLLM model runner: what the V1 and the V2 runner have in common."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import (
    ComparedTables,
    GroupView,
    KVAllocation,
    StepTypes,
    StepView,
    WindowTokens,
)
from canary_obs.engines.toolkit.block_slots import slots_of
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.known_tokens import KnownTokens
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.model_label import model_label
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.engines.vllm.allocation import kv_allocation
from canary_obs.engines.vllm.attention_tables import AttentionTables
from canary_obs.engines.vllm.block_changes import BlockChanges
from canary_obs.engines.vllm.cache_count import COUNTS_ATTRIBUTE
from canary_obs.engines.vllm.cached_blocks import CachedBlocks
from canary_obs.engines.vllm.connector_reports import ConnectorReports
from canary_obs.engines.vllm.draft_groups import DraftGroups
from canary_obs.engines.vllm.follows_requests import FollowsRequests
from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE, ForwardCount
from canary_obs.engines.vllm.groups import find_groups
from canary_obs.engines.vllm.heal_link import HEALS_ATTRIBUTE, HealLink
from canary_obs.engines.vllm.pending_events import EVENTS_ATTRIBUTE
from canary_obs.engines.vllm.readable_modules import keep_modules_readable
from canary_obs.engines.vllm.request_changes import changes_of
from canary_obs.engines.vllm.scales import KVScales
from canary_obs.engines.vllm.scheduler_reports import SchedulerSeconds
from canary_obs.engines.vllm.steady_step import Change, SteadyStep
from canary_obs.engines.vllm.step_hooks import StepHooks
from canary_obs.engines.vllm.token_chains import TOKENS_ATTRIBUTE
from canary_obs.engines.vllm.trace_headers import TRACES_ATTRIBUTE, SentTraces
from canary_obs.engines.vllm.versions import V1_VERSIONS, check_not_wrapped, check_version
from canary_obs.engines.vllm.window_tables import NULL_BLOCK, WindowTables, scheduled_requests
from canary_obs.errors import UnsupportedEngine
from canary_obs.slot_facts import request_name


class VllmAdapter(FollowsRequests):
    """Describes one model runner's KV cache, and wraps the runner's methods while attached.

    StepHooks, created at attach, calls the observer. Subclasses build the views of their runner's forwards
    (`wrap_forward`, `complete_view`) and know its requests' blocks (`request_blocks`, `update_requests`).
    """

    name = "vllm"
    supported: ClassVar[tuple[str, ...]] = V1_VERSIONS  # of vLLM, with this model runner
    healing: HealLink

    def __init__(
        self, runner: Any, *, worker: Any = None, fresh: bool = False,
        wrap_engine: Callable[[MethodPatches], None] | None = None,
    ) -> None:  # fmt: skip
        """`worker`: what calls the runner, where forwards are counted; None = they are at the runner itself.

        `wrap_engine` is called at attach, to wrap more than the runner; detach restores that too.
        `fresh`: nothing is in the prefix cache yet. Else every slot counts as in use until it is reset.
        """
        import vllm

        self.version = str(vllm.__version__)
        self.untried = check_version(self.version, self.supported)
        check_not_wrapped(runner)
        self.runner, self._worker, self._wrap_engine = runner, worker, wrap_engine
        with torch.inference_mode():  # its tensors were created in it, and are not to be written to outside
            self._found = find_groups(runner)
        self.vllm_groups = self._found.covered
        self._by_name = {group.view.name: group for group in self.vllm_groups}
        self._scales = KVScales(runner, self.vllm_groups)
        shapes = {
            name: (group.number, group.num_blocks, 0 if group.states else group.block_slots)
            for name, group in self._by_name.items()
        } | self._scales.shapes
        runs = {name: group.entry_tokens for name, group in self._by_name.items()}
        self.cached_blocks = CachedBlocks(shapes, self._blocks_of_requests, empty=fresh, slot_tokens=runs)
        numbers = range(len(runner.kv_cache_config.kv_cache_groups))
        given, empty = (self.vllm_groups, runner.device, numbers), fresh and not self.requests_running()
        changes = self._block_changes = BlockChanges(*given, empty=empty)
        self.states, loads, scales = changes.states, changes.loads, self._scales.sources
        self.connector = ConnectorReports(loads, self.vllm_groups, self.show_requests)
        self._windows, self._attention = WindowTables(self.vllm_groups), AttentionTables(self.vllm_groups)
        self._forwards, self.requests = ForwardCount(self._by_name), changes_of(runner, self.vllm_groups)
        self._scheduler_seconds, self._traces = SchedulerSeconds(), SentTraces()
        self.healing = HealLink(self._by_name, self._forwards, worker or runner, runner.device)
        self._patches, self.known_tokens = MethodPatches(), KnownTokens(runner.max_num_reqs, runner.device)
        self.inputs_persist = runner.speculative_config is None  # drafting changes them between two steps
        self._side_stream = SideStream(runner.device, enabled=self.inputs_persist)
        self._steady = SteadyStep(self.states, loads, scales)
        drafts = [group for group in self.vllm_groups if group.draft]
        self._drafts = DraftGroups(runner, drafts, self.step_types) if drafts else None
        self._hooks: StepHooks | None = None
        self._last_output: Any = None  # of the scheduler, before detach

    @property
    def groups(self) -> Sequence[GroupView]:
        """vLLM's KV cache groups without encoders; a draft's layers and scales are groups of their own."""
        return [group.view for group in self.vllm_groups] + self._scales.views

    @property
    def prefix_cache(self) -> CachedBlocks:
        """The cached blocks of the scheduler's block pool, as its events report them."""
        return self.cached_blocks

    @property
    def hooks(self) -> StepHooks:
        """The hooks in the runner's steps. Raises UnsupportedEngine while not attached."""
        if self._hooks is None:
            raise UnsupportedEngine("this adapter is not attached")
        return self._hooks

    @property
    @abstractmethod
    def step_types(self) -> StepTypes:
        """Types of the views to come."""

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Requests with the slot's block in their block list; for scales, which every one uses, none."""
        if (found := self._by_name.get(group)) is None:
            return ()
        block = slot // found.block_slots
        return tuple(request for request, blocks in self.request_blocks(found.number) if block in blocks)

    def request_slots(self, group: str, request: str) -> Tensor:
        """Those of the blocks in its block list."""
        found = self._by_name[group]
        for name, blocks in self.request_blocks(found.number):
            if request_name(name) == request:
                return slots_of(sorted(set(blocks) - {NULL_BLOCK}), found.block_slots)
        return torch.empty(0, dtype=torch.int64)

    def traceparent(self, request: str) -> str | None:
        """From the trace headers that vLLM's scheduler has of it."""
        return self._traces.get(request)

    def model(self) -> str | None:
        """Name and revision in vLLM's model configuration."""
        served = getattr(self.runner, "model_config", None)
        return model_label(getattr(served, "model", None), getattr(served, "revision", None))

    def reserve_scratch_slot(self) -> tuple[str, int]:
        """The first slot here of the null block, which vLLM never gives to a request."""
        for group in self.vllm_groups:
            if group.view.sources and group.of_tokens and not group.draft:
                return group.view.name, NULL_BLOCK * group.block_slots + group.sharding.first
        raise UnsupportedEngine("no group has bytes that can be checked: drills cannot inject faults")

    def allocation(self) -> KVAllocation:
        """From vLLM's KV cache configuration and tensors, and the model's configuration."""
        return kv_allocation(self.runner, self._found)

    def prefix_hits(self) -> dict[str, int] | None:
        """Slots of the blocks that joined requests, by the scheduler's count. None = it does not report."""
        return self._block_changes.hits.counted

    def compared_tables(self) -> dict[str, ComparedTables]:
        """By the tensors in attention's metadata; drafting, which has tables of its own, is left out."""
        return self._attention.counts

    def window_tokens(self) -> WindowTokens | None:
        """Tokens of the last forward's requests, by the block lists of full and sliding-window groups."""
        output = self._last_output if self._hooks is None else self._hooks.last_output
        if output is None or not self._windows.numbers:
            return None
        lists = {number: dict(self.request_blocks(number)) for number in self._windows.numbers}
        return self._windows.compare(scheduled_requests(output), lists)

    def attach(self, observer: Observer) -> None:
        """Wrap methods of the runner instance and start the idle thread."""
        check_not_wrapped(self.runner)
        self.warm_up()
        if self._drafts is not None:
            self._drafts.warm_up()
        own = ForwardStream(self.runner.device), self._side_stream
        hooks = self._hooks = StepHooks(self, observer, own, self._drafts, inputs_persist=self.inputs_persist)
        self.wrap_forward(self._patches, hooks)
        self._patches.wrap(self.runner, "execute_model", hooks.around_execute_model)
        if self._drafts is not None:
            self._patches.wrap(self.runner, "sample_tokens", hooks.around_drafting)
        # Around everything else, so that a forward is counted before a hook sees it.
        self._patches.wrap(self._worker or self.runner, "execute_model", self._forwards.around_execute_model)
        self.healing.attach(self._patches)
        self.connector.attach(self._patches, observer, hooks)
        if self._wrap_engine is not None:
            self._wrap_engine(self._patches)
        keep_modules_readable()
        hooks.idle_thread.start()

    def detach(self) -> None:
        """Stop the idle thread and restore all wrapped methods; idempotent."""
        if self._hooks is not None:
            self._last_output = self._hooks.last_output
            self._hooks.stop()
            guarded(self._hooks.observer, "announce", self.show_requests)  # the last findings are read later
            self._hooks = None
        self._patches.restore()
        self.connector.close()
        self._side_stream.join()

    def in_step(self) -> bool:
        """Whether the worker is in a step, or the device still runs what it launched."""
        return self._hooks is not None and (self._hooks.under_way or self.forward_counted)

    @property
    def forward_counted(self) -> bool:
        """Whether a forward was counted that the runner may not have begun."""
        return self._forwards.under_way

    def paused(self) -> AbstractContextManager[None]:
        """While entered, no step runs and the idle thread makes no calls."""
        return self.hooks.paused()

    def _follow(self, output: Any, observer: Observer) -> None:
        sent, events = output.__dict__, output.__dict__.get(EVENTS_ATTRIBUTE)
        if sent.get(FORWARDS_ATTRIBUTE) != self._forwards.number:
            self._forwards.note(output)  # it came past the worker's method
        self._scheduler_seconds.note(output, observer.overhead)
        if TRACES_ATTRIBUTE in sent:
            self._traces.note(output)
        if HEALS_ATTRIBUTE in sent:
            self.healing.note(output, observer)
        self.known_tokens.note(output.num_scheduled_tokens, sent.get(TOKENS_ATTRIBUTE))
        self.cached_blocks.apply(events, sent.get(COUNTS_ATTRIBUTE))
        if (change := self._steady.change(output, events)) is Change.NOTHING:
            self.requests.went_on(output)
        elif change is Change.GROWTH:
            self.requests.grow(output)
            self._block_changes.grow(output, observer)
            self._show_changes(output, {}, observer)
        else:
            self.update_requests(output)
            self._block_changes.report(output, events, observer)
            self._show_changes(output, self._block_changes.loads.loaded_from, observer)
            self._scales.follow(events, observer)
            self._steady.followed(output)
        if self.connector.followed:
            self.connector.follow(output)

    def end_step(self, observer: Observer) -> None:
        """What the step under way has loaded is there."""
        known, changes, loads = self.cached_blocks, self._block_changes, self._block_changes.loads
        arrived = changes.written or loads.landing or loads.failed
        if not (self.requests.due or known.due or arrived):  # as a rule
            return
        started = time.perf_counter()
        if self.requests.due or arrived:
            self.requests.settle()
        if known.due:
            known.catch_up()
        if arrived:
            changes.end_step(observer)
        observer.overhead["adapter"] += time.perf_counter() - started

    @abstractmethod
    def warm_up(self) -> None:
        """Launch each kernel of view building once: the first launch of a kernel takes up to 0.3 s."""

    @abstractmethod
    def wrap_forward(self, patches: MethodPatches, hooks: StepHooks) -> None:
        """Wrap the runner's methods so that `hooks.begin_forward` is called before each forward."""

    @abstractmethod
    def complete_view(self, view: StepView) -> StepView:
        """The view with request ids and digests, if it was built without them."""

    @abstractmethod
    def update_requests(self, output: Any) -> None:
        """Follow the requests that started, ended, resumed or grew; not where `RequestChanges.grow` does."""
