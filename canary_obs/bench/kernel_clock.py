"""Clocks of a canary's hooks without its kernels, where these run on the CPU as well."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches

_KERNELS = {
    "verify": ("verify_rows", "verify_list"),
    "write": ("write_identities",),
    "fingerprint": ("complete_slots", "baseline_slots", "compare_slots", "hash_slots"),
}
_HOOKS = {
    "before_write": "head", "forward_launched": "head", "after_forward": "tail", "after_step": "patrol",
}  # fmt: skip
KERNELS = "kernels"  # the clock of all of them


class KernelClock:
    """Reads a canary's clocks without the time of its compiled kernels: a GPU's host only launches those.

    What a call prepares for its kernel is counted as the kernel's. While no sweep runs, the kernels of
    `after_step` are the patrol's. Operations of torch and chains of the scheduler stay with their hook.
    """

    def __init__(self, canary: Any) -> None:
        """`canary` has the hooks of an observer, and `overhead`: its seconds by hook."""
        self._overhead: Mapping[str, float] = canary.overhead
        self._spent: dict[str, float] = {}  # in kernels, by hook
        self._hook = "adapter"  # which one is under way
        self._patches = MethodPatches()
        for method, hook in _HOOKS.items():
            self._patches.wrap(canary, method, self._named(hook))
        for operation, names in _KERNELS.items():
            module = importlib.import_module(f"canary_kernels.{operation}.cpu")
            for name in names:
                self._patches.wrap(module, name, self._timed)

    def read(self) -> dict[str, float]:
        """Seconds since the start: by hook without kernels, and all `kernels`."""
        hooks = {hook: spent - self._spent.get(hook, 0.0) for hook, spent in self._overhead.items()}
        return hooks | {KERNELS: sum(self._spent.values())}

    def close(self) -> None:
        """Take the clock away; idempotent."""
        self._patches.restore()

    def _named(self, hook: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(*given: Any, **named: Any) -> Any:
                outer, self._hook = self._hook, hook
                try:
                    return original(*given, **named)
                finally:
                    self._hook = outer

            return method

        return wrap

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*given, **named)
            finally:
                spent = time.perf_counter() - started
                self._spent[self._hook] = self._spent.get(self._hook, 0.0) + spent

        return kernel


def without_kernels(host_us: dict[str, list[float]]) -> dict[str, list[float]]:
    """Microseconds by hook and in `all`, which leaves the kernels out where there is a clock of them."""
    if KERNELS not in host_us:
        return host_us
    pairs = zip(host_us["all"], host_us[KERNELS], strict=True)
    return host_us | {"all": [round(spent - kernels, 1) for spent, kernels in pairs]}
