"""Shows the reference engine to the canary. The engine itself does not know that it is watched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.buffers import KVSource, source_from_tensor
from canary_kernels.layout import Part
from canary_obs.engines.adapter import Observer
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.reference.engine import Engine
from canary_obs.engines.reference.radix_cache import RadixCache
from canary_obs.engines.reference.request import Request
from canary_obs.engines.reference.runner import ForwardBatch, placed
from canary_obs.errors import UnsupportedEngine
from canary_obs.views import CachedSlots, GroupStep, GroupView, StepTypes, StepView

GROUP = "full"
SUPPORTED_VERSIONS = ("1.0",)


class RadixView:
    """The radix cache as sweeps walk it, from the cache's per-slot arrays."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._mark = -1

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot the cache holds now; marks the moment that `still_cached` refers to."""
        _check_group(group)
        cache = self._cache
        self._mark = cache.clock
        slots = cache.held(unlocked_only=unlocked_only)
        return CachedSlots(
            slots=torch.from_numpy(slots),
            positions=torch.from_numpy(cache.position[slots]),
            previous=torch.from_numpy(cache.previous[slots]),
        )

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: held without interruption since the last `cached` call."""
        _check_group(group)
        return torch.from_numpy(self._cache.inserted_at[slots.numpy()] <= self._mark)


class ReferenceAdapter:
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
        expected_ids=torch.int32,
    )

    def __init__(self, engine: Engine) -> None:
        self.version = engine.version
        self._engine = engine
        self._observer: Observer | None = None
        self._digests = PrefixDigests(engine.config.max_running)
        self._prefix_cache = RadixView(engine.scheduler.cache)
        kv = engine.runner.pool.kv
        self._group = GroupView(name=GROUP, num_slots=kv.shape[2], page_size=1, sources=_sources(kv))

    @property
    def groups(self) -> Sequence[GroupView]:
        """One group: every layer shares the slot numbering."""
        return (self._group,)

    @property
    def prefix_cache(self) -> RadixView:
        """The radix cache."""
        return self._prefix_cache

    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n]: slots of running requests and of the prefix cache, on the CPU."""
        _check_group(group)
        return torch.from_numpy(self._engine.scheduler.live_slots())

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the positions they have computed."""
        _check_group(group)
        running = self._engine.scheduler.running
        return tuple(request.id for request in running if slot in request.slots[: request.computed])

    def attach(self, observer: Observer) -> None:
        """Wrap the seams `runner.forward`, `engine.step` and `engine.idle` on the instances."""
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
        forward, step, idle = runner.forward, engine.step, engine.idle

        def observed_forward(batch: ForwardBatch) -> Tensor:
            view = self._view(batch, observer)
            if view is None:
                return forward(batch)
            observer.before_forward(view)
            try:
                logits = forward(batch)
            except BaseException:
                observer.forward_failed(view)
                raise
            observer.after_forward(view)
            return logits

        def observed_step() -> tuple[Request, ...]:
            finished = step()
            observer.after_step()
            return finished

        def observed_idle() -> bool:
            more = idle()
            return observer.idle() or more

        # In the instance dictionaries: deleting the entries restores the engine exactly.
        vars(runner)["forward"] = observed_forward
        vars(engine).update(step=observed_step, idle=observed_idle)

    def detach(self) -> None:
        """Remove the wrappers; idempotent."""
        if self._observer is None:
            return
        self._observer = None
        vars(self._engine.runner).pop("forward", None)
        for name in ("step", "idle"):
            vars(self._engine).pop(name, None)

    def _view(self, batch: ForwardBatch, observer: Observer) -> StepView | None:
        """The forward as views of the engine's tensors; None when that failed, which is reported."""
        try:
            return StepView(
                request_ids=[request.id for request in batch.requests],
                rows=batch.rows,
                prefix_lens=batch.prefix_lens,
                extend_lens=batch.extend_lens,
                token_starts=batch.token_starts,
                input_ids=batch.input_ids,
                positions=batch.positions,
                digests=placed(self._digests.advance(batch.requests).numpy(), batch.rows.device),
                groups={
                    GROUP: GroupStep(
                        slot_table=self._engine.runner.pool.req_to_token, out_slots=batch.out_slots
                    )
                },
                expected_ids=placed(_expected(batch), batch.rows.device),
            )
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("step_view", error)
            return None


def _expected(batch: ForwardBatch) -> NDArray[np.int32]:
    """int32 [num_tokens] from the requests' own token lists, not from what the runner was given."""
    spans = zip(batch.requests, batch.extends, strict=True)
    return np.concatenate([r.tokens[r.computed : r.computed + n] for r, n in spans])


def _sources(kv: Tensor) -> tuple[KVSource, ...]:
    return tuple(
        source_from_tensor(kv[layer, half], part, layer)
        for layer in range(kv.shape[0])
        for half, part in ((0, Part.K), (1, Part.V))
    )


def _check_group(group: str) -> None:
    if group != GROUP:
        raise UnsupportedEngine(
            f"group {group!r}: the reference engine has one group, {GROUP!r}; name that one"
        )
