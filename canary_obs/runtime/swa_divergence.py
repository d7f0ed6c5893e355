"""Sliding-window groups beside full ones: their difference shows that both are really looked at."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from canary_kernels import layout
from canary_obs.records import SwaDivergence
from canary_obs.views import ShowsWindow

if TYPE_CHECKING:
    from canary_obs.engines.adapter import EngineAdapter
    from canary_obs.pipeline.delayed_device_host import Sample
    from canary_obs.runtime.state import DeviceState

log = logging.getLogger("canary_obs.swa_divergence")
LOG_KEY = "kv_canary_swa_divergence"
_PHASES = (layout.Phase.HEAD, layout.Phase.TAIL)


class SwaReporter:
    """Reports every `interval` forward steps (0 = only at the end), from host bookkeeping and counters."""

    def __init__(self, state: DeviceState, adapter: EngineAdapter, interval: int) -> None:
        self._state, self._interval, self._reported = state, interval, 0
        windowed = any(group.view.window is not None for group in state.groups)
        self._adapter = adapter if windowed and isinstance(adapter, ShowsWindow) else None
        self.latest: SwaDivergence | None = None  # None = the engine has no such groups

    def due(self, step: int) -> bool:
        """Whether it is time to report."""
        if self._adapter is None:
            return False
        interval = self._interval
        return self.latest is None or (interval > 0 and step // interval > self._reported // interval)

    def report(self, step: int, sample: Sample | None) -> None:
        """Count now, and say so in one line of the engine's log."""
        tokens = self._adapter.window_tokens() if self._adapter is not None else None
        if tokens is None:
            return
        self._reported = step
        self.latest = SwaDivergence(
            step=step,
            verified_full=self._verified(tokens.full, sample),
            verified_swa=self._verified(tokens.windowed, sample),
            index_divergence=tokens.diverging,
            out_of_window=tokens.out_of_window,
            full_groups=tokens.full,
            swa_groups=tokens.windowed,
        )
        log.info("%s=%s", LOG_KEY, msgspec.json.encode(self.latest).decode())

    def _verified(self, groups: tuple[str, ...], sample: Sample | None) -> int:
        """Slots of the least verified of these groups, around forwards, as of the newest host copy."""
        if sample is None:
            return 0
        counters = sample.values.view(-1, layout.COUNTER_WORDS)
        return min(
            sum(int(counters[group.index, layout.COUNT_VERIFIED + phase]) for phase in _PHASES)
            for group in self._state.named(groups)
        )
