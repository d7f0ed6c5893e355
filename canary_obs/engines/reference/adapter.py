"""EngineAdapter of the reference engine, which does not know the canary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import (
    GroupView,
    KVAllocation,
    StepTypes,
    StepView,
    WindowTokens,
)
from canary_obs.engines.reference.allocation import allocation
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.reference.draft_group import DRAFT, DraftGroup
from canary_obs.engines.reference.expected_tokens import expected_tokens
from canary_obs.engines.reference.full_group import FULL, FullGroup
from canary_obs.engines.reference.groups import ReferenceGroup, by_numbering, target_groups
from canary_obs.engines.reference.heal_link import ReferenceHealing
from canary_obs.engines.reference.host_tier_hooks import HostTierHooks
from canary_obs.engines.reference.instrumented import ViewBuilder, instrumented, instrumented_on_side_stream
from canary_obs.engines.reference.prefix_cache import RadixPrefixCache, named
from canary_obs.engines.reference.prefix_hits import hits_before
from canary_obs.engines.reference.request_changes import FollowsRequests, RequestChanges
from canary_obs.engines.reference.swa_group import SWA, SwaGroup
from canary_obs.engines.reference.transfer_hooks import TransferHooks
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.errors import UnsupportedEngine
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.to_device import to_device
from canary_obs.runtime.device.upload_ring import UploadRing
from canary_obs.slot_facts import request_name

SUPPORTED_VERSIONS = ("1.0",)
_STEPS_AHEAD = 8  # steps the host may be ahead of the GPU before an upload allocates memory


class ReferenceAdapter(FollowsRequests):
    """Wraps `forward` and `sample` of the runner, and `step` and `idle` of the engine.

    On a GPU most checks run on a side stream, and `sample` calls `after_step` before it waits for the tokens:
    the host has time while the GPU runs the forward. With a draft model and on a CPU all run in place.
    """

    name = "reference"
    step_types = StepTypes(
        slot_table=torch.int32,
        rows=torch.int64,
        lengths=torch.int64,
        input_ids=torch.int64,
        positions=torch.int64,
        out_slots=torch.int64,
        has_digests=True,
        expected_ids=torch.int64,
    )

    def __init__(self, engine: Engine) -> None:
        self.version = engine.version
        self._engine = engine
        self._observer: Observer | None = None
        self._patches = MethodPatches()
        self._tier_hooks: HostTierHooks | None = None
        self._step_ended = False  # after_step was called in the engine step under way
        self._in_step = False
        self._scratch: NDArray[np.int64] | None = None
        self._digests = PrefixDigests(engine.config.max_running)
        largest = engine.config.max_running + engine.config.token_budget
        self._uploads = UploadRing(largest, _STEPS_AHEAD, engine.runner.device)
        self._target = {group.view.name: group for group in target_groups(engine)}
        self._draft = None if engine.drafter is None else DraftGroup(engine, engine.drafter)
        # Drafting runs between the target's forward and the end of the step, and needs its checks done.
        self._side_stream = SideStream(engine.runner.device, enabled=engine.drafter is None)
        self._groups: dict[str, ReferenceGroup] = dict(self._target)
        if self._draft is not None:
            self._groups[DRAFT] = self._draft
        self._prefix_cache = RadixPrefixCache(self._groups)
        self.requests = RequestChanges(engine, self._groups)
        self.healing = self._healing = ReferenceHealing(engine, self._groups, self._end_step)

    @property
    def groups(self) -> Sequence[GroupView]:
        """One group per slot numbering, see `groups.py`."""
        return tuple(group.view for group in self._groups.values())

    @property
    def prefix_cache(self) -> RadixPrefixCache:
        """The radix cache."""
        return self._prefix_cache

    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""
        return named(self._groups, group).in_use()

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the positions they have computed."""
        return named(self._groups, group).holders(slot)

    def request_slots(self, group: str, request: str) -> Tensor:
        """Slots of which the request is a holder."""
        slots, found = self.slots_in_use(group), named(self._groups, group)
        held = [request in map(request_name, found.holders(slot)) for slot in slots.tolist()]
        return slots[torch.tensor(held, dtype=torch.bool)]

    def model(self) -> str:
        """The checkpoint; random weights are named by their shape and seed."""
        config = self._engine.config
        shape = config.shape
        random = f"random-{shape.layers}x{shape.hidden}-seed{config.seed}"
        return random if config.checkpoint is None else config.checkpoint.name

    def reserve_scratch_slot(self) -> tuple[str, int]:
        """The first slot of a page that is allocated until detach."""
        allocator = self._engine.scheduler.allocator
        if allocator.free_pages == 0:
            raise UnsupportedEngine("no page of the pool is free; attach before the engine has filled it")
        self._scratch = allocator.allocate(1)
        return FULL, int(self._scratch[0])

    def allocation(self) -> KVAllocation:
        """The pool's own memory, and the layers of the model's shape."""
        return allocation(self._engine)

    def forwards(self) -> dict[str, int]:
        """What the engine's own loop counts: each of the target's forwards writes all groups but `draft`."""
        statistics = self._engine.statistics
        counts = dict.fromkeys(self._groups, statistics.forwards)
        if self._draft is not None:
            counts[DRAFT] = statistics.draft_forwards
        return counts

    def prefix_hits(self) -> dict[str, int]:
        """What the scheduler counts as it admits requests."""
        return {name: group.num_joined() for name, group in self._groups.items()}

    def window_tokens(self) -> WindowTokens | None:
        """Live tokens by what the sliding-window group holds; None = the model has no such layers."""
        group = self._groups.get(SWA)
        return group.tokens() if isinstance(group, SwaGroup) else None

    def in_step(self) -> bool:
        """Whether the engine is in `step`, which waits for the device."""
        return self._in_step

    def attach(self, observer: Observer) -> None:
        """Wrap methods on the engine's instances."""
        if self._observer is observer:
            return
        self._check_supported()
        self._observer = observer
        engine, runner, patches = self._engine, self._engine.runner, self._patches
        join = self._side_stream.join
        if engine.scheduler.host_tier is not None:
            offloaded = [name for name, group in self._target.items() if isinstance(group, FullGroup)]
            tier, requests = engine.scheduler.host_tier, self.requests
            self._tier_hooks = HostTierHooks(tier, observer, offloaded, join, requests)
            self._tier_hooks.wrap(patches)
        TransferHooks(engine.connector, observer, by_numbering(self._groups), join).wrap(patches)
        self.requests.wrap(patches, observer)
        patches.wrap(runner, "forward", self._around_forward(observer))
        if self._draft is not None:
            view_of = self._draft.view_of
            patches.wrap(self._draft.runner, "forward", lambda own: instrumented(own, view_of, observer))
        if runner.device.type != "cpu":
            patches.wrap(runner, "sample", self._around_sample)
        patches.wrap(engine, "step", self._around_step(observer))
        patches.wrap(engine, "idle", self._around_idle(observer))
        self._healing.attach(patches, observer)

    def detach(self) -> None:
        """Restore the engine's methods and free the scratch page; idempotent."""
        if self._scratch is not None:
            self._engine.scheduler.allocator.free(self._scratch)
            self._scratch = None
        if self._observer is not None:
            self._observer = self._tier_hooks = None
            self._side_stream.join()
            self._healing.detach()
            self._patches.restore()

    def _check_supported(self) -> None:
        if self.version not in SUPPORTED_VERSIONS:
            raise UnsupportedEngine(
                f"reference engine {self.version}: supported are {', '.join(SUPPORTED_VERSIONS)}; "
                "use a supported engine or a newer canary_obs"
            )
        engine = self._engine
        if "forward" in vars(engine.runner) or "step" in vars(engine) or "idle" in vars(engine):
            raise UnsupportedEngine(
                "this engine is wrapped already, by another canary or another tool; detach that first"
            )

    def _around_forward(self, observer: Observer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            if not self._side_stream.enabled:
                checked = instrumented(forward, self._view, observer)
            else:
                views = ViewBuilder(self._plain_view, self._complete)
                checked = instrumented_on_side_stream(forward, views, observer, self._side_stream)
            shown = self.requests.before(checked, observer)
            return hits_before(shown, self._groups, self._side_stream, observer)

        return make

    def _around_step(self, observer: Observer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(step: Callable[[], tuple[Request, ...]]) -> Callable[..., Any]:
            def observed_step() -> tuple[Request, ...]:
                self._step_ended, self._in_step = False, True
                try:
                    finished = step()
                finally:
                    self._in_step = False
                if not self._step_ended:
                    observer.after_step()
                return finished

            return observed_step

        return make

    def _around_idle(self, observer: Observer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(idle: Callable[[], bool]) -> Callable[..., Any]:
            def observed_idle() -> bool:
                more = idle()
                return observer.idle() or more

            return observed_idle

        return make

    def _around_sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def observed_sample(batch: ForwardBatch, logits: Tensor) -> list[int | None]:
            self._step_ended = True
            try:
                self.after_step()
                tokens: list[int | None] = sample(batch, logits)
                return tokens
            finally:
                self._side_stream.join()

        return observed_sample

    def _end_step(self) -> None:
        """Read findings before the tokens are given out: healing acts upon them."""
        if not self._step_ended:
            self._step_ended = True
            self.after_step()

    def after_step(self) -> None:
        """Call the observer once per step, on a GPU before the wait for the tokens."""
        if self._observer is not None:
            self._observer.after_step(self._side_stream.unordered)

    def _view(self, batch: ForwardBatch) -> StepView:
        return self._complete(self._plain_view(batch), batch)

    def _oracle(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Digests of the prefixes, and the tokens that this forward adds, in one copy to the device."""
        digests, expected = self._digests.advance(batch.requests), torch.from_numpy(expected_tokens(batch))
        if self._uploads.ready:
            digests, expected = self._uploads.put(digests, expected)
            return digests, expected
        device = batch.rows.device
        return to_device(digests.numpy(), device), to_device(expected.numpy(), device)

    def _plain_view(self, batch: ForwardBatch) -> StepView:
        """Views of the engine's tensors, without request ids, digests and expected ids."""
        return StepView(
            request_ids=(),
            rows=batch.rows,
            prefix_lens=batch.prefix_lens,
            extend_lens=batch.extend_lens,
            token_starts=batch.token_starts,
            input_ids=batch.input_ids,
            positions=batch.positions,
            digests=None,
            groups={name: group.step(batch) for name, group in self._target.items()},
        )

    def _complete(self, view: StepView, batch: ForwardBatch) -> StepView:
        digests, expected = self._oracle(batch)
        names = [request.id for request in batch.requests]
        return replace(view, request_ids=names, digests=digests, expected_ids=expected)
