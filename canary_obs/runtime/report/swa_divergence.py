"""Reports how sliding-window groups differ from full ones: evidence that both are really checked."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from canary_kernels import layout
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.records import SwaDivergence
from canary_obs.runtime.device.delayed_device_host import Sample
from canary_obs.runtime.device.state import DeviceState

log = logging.getLogger("canary_obs.swa_divergence")
LOG_KEY = "kv_canary_swa_divergence"
_NEVER = float("inf")
_PHASES = (layout.Phase.HEAD, layout.Phase.TAIL)


class SwaReporter:
    """Reports every `interval` forward steps (0 = only at detach), from host data and counters.

    Before there are forwards and counters to report there is no report: zeros would read as "not protected".
    """

    def __init__(self, state: DeviceState, adapter: EngineAdapter, interval: int) -> None:
        self._state, self._interval = state, interval
        windowed = any(group.view.window is not None for group in state.groups)
        self._adapter = adapter if windowed else None
        self.latest: SwaDivergence | None = None  # None = nothing reported yet
        # The forward step of the next report.
        self.due_step: float = interval if interval and self._adapter is not None else _NEVER

    def report(self, step: int, sample: Sample | None) -> None:
        """Update `latest` and log it; `sample` is the newest host copy of the counters, None = none yet."""
        if self._adapter is None or sample is None or step == 0:
            return
        tokens = self._adapter.window_tokens()
        if tokens is None:
            return
        self.due_step = step // self._interval * self._interval + self._interval if self._interval else _NEVER
        self.latest = SwaDivergence(
            step=step,
            verified_full=self._verified(tokens.full, sample),
            verified_swa=self._verified(tokens.windowed, sample),
            index_divergence=tokens.diverging,
            out_of_window=tokens.out_of_window,
            full_groups=tokens.full,
            swa_groups=tokens.windowed,
        )
        log.info("%s=%s", LOG_KEY, msgspec.json.encode(_with_sglang_names(self.latest)).decode())

    def _verified(self, groups: tuple[str, ...], sample: Sample) -> int:
        """Slots verified at head and tail in the group of `groups` where they are fewest."""
        counters = sample.values.view(-1, layout.COUNTER_WORDS)
        return min(
            sum(int(counters[group.index, layout.COUNT_VERIFIED + phase]) for phase in _PHASES)
            for group in self._state.named(groups)
        )


def _with_sglang_names(found: SwaDivergence) -> dict[str, Any]:
    """With the names that SGLang's own canary has for the same numbers: its readers read this line, too."""
    ours: dict[str, Any] = msgspec.to_builtins(found)
    return ours | {
        "forward_ct": found.step,
        "verify_full": found.verified_full,
        "verify_swa": found.verified_swa,
        "swa_full_idx_divergence": found.index_divergence,
        "swa_out_of_window_tokens": found.out_of_window,
    }
