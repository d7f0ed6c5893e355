"""Shows the reference engine to the canary. The engine itself does not know that it is watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.adapter import EngineAdapter, PrefixCache
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import CachedSlots, GroupView, StepTypes, StepView, WindowTokens
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.reference.draft_group import DRAFT, DraftGroup
from canary_obs.engines.reference.full_group import FullGroup
from canary_obs.engines.reference.groups import FULL, ShownGroup, shown_groups
from canary_obs.engines.reference.host_tier_hooks import HostTierHooks
from canary_obs.engines.reference.instrumented import Views, instrumented, instrumented_on_side_stream
from canary_obs.engines.reference.swa_group import SWA, SwaGroup
from canary_obs.engines.reference.transfer_hooks import TransferHooks
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.errors import UnsupportedEngine
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.to_device import to_device
from canary_obs.runtime.device.upload_ring import UploadRing

SUPPORTED_VERSIONS = ("1.0",)
_STEPS_AHEAD = 8  # that the engine may be ahead of the GPU before uploads take memory of their own


class CachedGroups(PrefixCache):
    """The radix cache as sweeps walk it, group by group."""

    def __init__(self, groups: dict[str, ShownGroup]) -> None:
        self._groups = groups

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot the cache holds now; marks the moment that `still_cached` refers to."""
        return _named(self._groups, group).cached(unlocked_only=unlocked_only)

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: held without interruption since the last `cached` call."""
        return _named(self._groups, group).still_cached(slots)

    def swa_resident(self, group: str, slots: Tensor) -> Tensor | None:
        """bool [n]: a sliding-window slot is there too; groups other than `full` are not cut."""
        swa = self._groups.get(SWA)
        if not isinstance(swa, SwaGroup):
            return None
        return swa.resident(slots) if group == FULL else torch.ones_like(slots, dtype=torch.bool)


class ReferenceAdapter(EngineAdapter):
    """EngineAdapter of the reference engine."""

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
        self._tier: HostTierHooks | None = None
        self._port: TransferHooks | None = None
        self._scratch: NDArray[np.int64] | None = None
        self._digests = PrefixDigests(engine.config.max_running)
        largest = engine.config.max_running + engine.config.token_budget
        self._uploads = UploadRing(largest, _STEPS_AHEAD, engine.runner.device)
        self._written = {group.view.name: group for group in shown_groups(engine)}
        self._draft = None if engine.drafter is None else DraftGroup(engine, engine.drafter)
        # Drafts are made between the target's forward and the end of the step.
        self._side_stream = SideStream(engine.runner.device, enabled=engine.drafter is None)
        self._groups: dict[str, ShownGroup] = dict(self._written)
        if self._draft is not None:
            self._groups[DRAFT] = self._draft
        self._prefix_cache = CachedGroups(self._groups)

    @property
    def groups(self) -> Sequence[GroupView]:
        """One per slot numbering, see `groups.py`."""
        return tuple(group.view for group in self._groups.values())

    @property
    def prefix_cache(self) -> CachedGroups:
        """The radix cache."""
        return self._prefix_cache

    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n]: slots of running requests and of the prefix cache, on the CPU."""
        return _named(self._groups, group).in_use()

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the positions they have computed."""
        return _named(self._groups, group).holders(slot)

    def reserve_scratch_slot(self) -> tuple[str, int]:
        """The first slot of a page taken from the allocator until detach."""
        allocator = self._engine.scheduler.allocator
        if allocator.free_pages == 0:
            raise UnsupportedEngine("no page of the pool is free; attach before the engine has filled it")
        self._scratch = allocator.allocate(1)
        return FULL, int(self._scratch[0])

    def window_tokens(self) -> WindowTokens | None:
        """None = the model has no sliding-window layers."""
        group = self._groups.get(SWA)
        return group.tokens() if isinstance(group, SwaGroup) else None

    def attach(self, observer: Observer) -> None:
        """Wrap the seams on the instances: `forward` and `sample` of the runner, `step` and `idle`."""
        engine, runner = self._engine, self._engine.runner
        if self._observer is observer:
            return
        if self.version not in SUPPORTED_VERSIONS:
            raise UnsupportedEngine(
                f"reference engine {self.version}: supported are {', '.join(SUPPORTED_VERSIONS)}; "
                "use a supported engine or a newer canary_obs"
            )
        if "forward" in vars(runner) or "step" in vars(engine) or "idle" in vars(engine):
            raise UnsupportedEngine("this engine is wrapped already; detach what wraps it, then attach")
        self._observer = observer
        forward, sample, step, idle = runner.forward, runner.sample, engine.step, engine.idle
        advanced = False  # within one engine step: after_step was called

        def observed_sample(batch: ForwardBatch, logits: Tensor) -> list[int | None]:
            # Ahead of the wait for the tokens: while the GPU runs the forward, the host has time.
            nonlocal advanced
            advanced = True
            try:
                self.after_step()
                return sample(batch, logits)
            finally:
                self._side_stream.join()

        def observed_step() -> tuple[Request, ...]:
            nonlocal advanced
            advanced = False
            finished = step()
            if not advanced:
                observer.after_step()
            return finished

        def observed_idle() -> bool:
            more = idle()
            return observer.idle() or more

        # In the instance dictionaries: deleting the entries restores the engine exactly.
        if engine.scheduler.host_tier is not None:
            self._tier = HostTierHooks(engine.scheduler.host_tier, observer, FULL)
            self._tier.wrap()
        travelling = [name for name, group in self._written.items() if isinstance(group, FullGroup)]
        self._port = TransferHooks(engine.connector, observer, travelling)
        self._port.wrap()
        if self._side_stream.enabled:
            views = Views(self._plain_view, self._complete)
            vars(runner)["forward"] = instrumented_on_side_stream(forward, views, observer, self._side_stream)
        else:
            vars(runner)["forward"] = instrumented(forward, self._view, observer)
        if self._draft is not None:
            drafting = self._draft.runner
            vars(drafting)["forward"] = instrumented(drafting.forward, self._draft.view_of, observer)
        if runner.device.type != "cpu":
            vars(runner)["sample"] = observed_sample
        vars(engine).update(step=observed_step, idle=observed_idle)

    def detach(self) -> None:
        """Remove the wrappers, give the lent page back; idempotent."""
        if self._scratch is not None:
            self._engine.scheduler.allocator.free(self._scratch)
            self._scratch = None
        if self._observer is None:
            return
        self._observer = None
        self._side_stream.join()
        if self._tier is not None:
            self._tier.unwrap()
            self._tier = None
        if self._port is not None:
            self._port.unwrap()
            self._port = None
        if self._draft is not None:
            vars(self._draft.runner).pop("forward", None)
        for name in ("forward", "sample"):
            vars(self._engine.runner).pop(name, None)
        for name in ("step", "idle"):
            vars(self._engine).pop(name, None)

    def after_step(self) -> None:
        """What the observer does once per step; on a GPU ahead of the wait for the tokens."""
        if self._observer is not None:
            self._observer.after_step(self._side_stream.unordered)

    def _view(self, batch: ForwardBatch) -> StepView:
        return self._complete(self._plain_view(batch), batch)

    def _oracle(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Digests of the prefixes and the tokens that this forward adds, in one copy to the device."""
        digests, expected = self._digests.advance(batch.requests), torch.from_numpy(_expected(batch))
        if self._uploads.ready:
            digests, expected = self._uploads.put(digests, expected)
            return digests, expected
        device = batch.rows.device
        return to_device(digests.numpy(), device), to_device(expected.numpy(), device)

    def _plain_view(self, batch: ForwardBatch) -> StepView:
        """The forward as views of the engine's tensors, without what must be worked out first."""
        return StepView(
            request_ids=(),
            rows=batch.rows,
            prefix_lens=batch.prefix_lens,
            extend_lens=batch.extend_lens,
            token_starts=batch.token_starts,
            input_ids=batch.input_ids,
            positions=batch.positions,
            digests=None,
            groups={name: group.step(batch) for name, group in self._written.items()},
        )

    def _complete(self, view: StepView, batch: ForwardBatch) -> StepView:
        digests, expected = self._oracle(batch)
        names = [request.id for request in batch.requests]
        return replace(view, request_ids=names, digests=digests, expected_ids=expected)


def _expected(batch: ForwardBatch) -> NDArray[np.int64]:
    """int64 [num_tokens]: mock traffic's oracle, else the requests' own token lists; never the runner's."""
    requests, extends = batch.requests, batch.extends
    if len(requests) == sum(extends):  # one each, in half the time
        next_ids = (r.tokens[r.computed] if r.sampling.oracle is None else _known(r, 1)[0] for r in requests)
        return np.fromiter(next_ids, np.int64, len(requests))
    spans = [_known(r, n) for r, n in zip(requests, extends, strict=True)]
    return np.concatenate(spans, dtype=np.int64)


def _known(request: Request, extend: int) -> NDArray[np.int32]:
    oracle, start = request.sampling.oracle, request.computed
    stop = start + extend
    if oracle is None:
        return request.tokens[start:stop]
    known = min(stop, request.length)  # behind it lie proposals, which are the draft model's
    return np.concatenate([oracle.tokens(start, known), request.tokens[known:stop]])


def _named(groups: dict[str, ShownGroup], name: str) -> ShownGroup:
    if name not in groups:
        raise UnsupportedEngine(
            f"group {name!r}: the reference engine has {', '.join(groups)}; name one of them"
        )
    return groups[name]
