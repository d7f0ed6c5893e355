"""Injects deliberate corruption into the engine's tensors, and restores it once detected."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.config import PREFIX, CanaryConfig
from canary_obs.config_values import parse_perturb
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.views import StepTypes, StepView
from canary_obs.errors import ConfigurationError
from canary_obs.records import Identity, Violation
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.perturb.flips import Flips
from canary_obs.runtime.perturb.injection import Outcome
from canary_obs.runtime.perturb.injection_log import InjectionLog
from canary_obs.runtime.perturb.table_entries import TableEntries
from canary_obs.runtime.perturb.target import Target
from canary_obs.runtime.perturb.token_swaps import TokenSwaps
from canary_obs.vocabulary import PerturbMode


class Injector:
    """The perturbation modes on one group. Waits for the device: not for production."""

    def __init__(
        self,
        state: DeviceState,
        adapter: EngineAdapter,
        config: CanaryConfig,
        identity: Identity,
    ) -> None:
        self._probabilities = parse_perturb(config.perturb)
        if PerturbMode.NEXT_TOKEN_SWAP in self._probabilities:
            _check_tokens_known(adapter.step_types, config)
        self._warmup, self._limit = config.perturb_warmup, config.perturb_limit
        rank = f"rank {identity.rank} of {identity.engine}/{identity.instance}"
        self.injections = InjectionLog(tuple(self._probabilities), rank)
        group = _group_named(state, config.perturb_group)
        self._target = Target(group, config.perturb_seed, self.injections)
        self._flips = Flips(self._target, adapter.prefix_cache)
        self._entries, self._swaps = TableEntries(self._target), TokenSwaps(self._target)

    def before_forward(self, view: StepView, step: int) -> None:
        """Inject into what the forward is about to use, if it uses the group."""
        self._entries.abandon()  # of a forward that failed
        self._swaps.abandon()
        self._swaps.follow(view)
        self._try(PerturbMode.REQ_TO_TOKEN, view, step, lambda: self._entries.redirect(view, step))
        self._try(PerturbMode.REAL_KV_USED, view, step, lambda: self._flips.used(view, step))
        self._try(PerturbMode.NEXT_TOKEN_SWAP, view, step, lambda: self._swaps.swap(view, step))

    def after_forward(self, view: StepView, step: int) -> None:
        """Restore the slot table; inject what follows a forward."""
        self._entries.restore()
        self._swaps.written()
        self._try(PerturbMode.REAL_KV_POST_FORWARD, view, step, lambda: self._flips.written(view, step))
        self._try(PerturbMode.REAL_KV_UNUSED_CACHE, view, step, lambda: self._flips.unused(step))

    def match(self, violations: list[Violation], *, settled: bool) -> None:
        """Match violations with open injections; restore detected flips.

        `settled` = every violation up to the current step is known: injections without one can be closed.
        """
        for injection in self.injections.match(violations):
            self._flips.restore(injection)
        if not settled:
            return
        self._entries.settle()
        self._swaps.settle()
        for injection in self.injections.open:
            self._flips.expire(injection)

    def finish(self) -> None:
        """Close open injections as missed. Call after a last check of every record."""
        self._swaps.finish()
        for injection in self.injections.open:
            self.injections.close(injection, Outcome.MISSED, "no check named it")

    def _try(self, mode: PerturbMode, view: StepView, step: int, inject: Callable[[], str | None]) -> None:
        """Draw; then inject, or note why not."""
        probability = self._probabilities.get(mode, 0.0)
        if not probability or step <= self._warmup or self._target.random.random() >= probability:
            return
        if self._limit and self.injections.injected >= self._limit:
            why: str | None = f"the limit of {self._limit} injections is reached"
        elif self._target.name not in view.groups:
            why = "the forward does not use the group"
        else:
            why = inject()
        if why is not None:
            self.injections.skip(mode, self._target.name, step, why)


def injector_of(
    state: DeviceState, adapter: EngineAdapter, config: CanaryConfig, identity: Identity
) -> Injector | None:
    """What the settings ask for; None = no faults are injected. Raises ConfigurationError."""
    return Injector(state, adapter, config, identity) if config.perturb else None


def _group_named(state: DeviceState, name: str) -> Group:
    """The group of this name; of an engine with one group, that one needs no name."""
    if name in state.by_name:
        return state.by_name[name]
    if not name and len(state.groups) == 1:
        return state.groups[0]
    rule = "the engine has no such group" if name else f"the engine has {len(state.groups)} groups"
    raise ConfigurationError(
        f"{PREFIX}PERTURB_GROUP", name, rule,
        f"Name the one that faults are injected into. Groups are: {', '.join(state.by_name)}.",
    )  # fmt: skip


def _check_tokens_known(types: StepTypes | None, config: CanaryConfig) -> None:
    """A swap can be found only where the engine says which tokens it means."""
    if types is None or types.has_digests or types.has_known_tokens or types.expected_ids is not None:
        return
    raise ConfigurationError(
        f"{PREFIX}PERTURB", config.perturb, "this engine's adapter shows no tokens to compare inputs with",
        f"Leave out {PerturbMode.NEXT_TOKEN_SWAP.value}.",
    )  # fmt: skip
