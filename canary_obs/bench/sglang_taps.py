"""What `canary-obs bench sglang-gpu` has in each engine's scheduler: times of its steps, flips, and a report.

An entry point of `sglang.srt.plugins`, in engines with and without a canary. Each command is a call of the
scheduler's method `kv_canary_bench` between two steps, by SGLang's own `collective_rpc`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from canary_obs.bench.canary_counts import canary_counts
from canary_obs.bench.launch_speed import launch_as_alone
from canary_obs.bench.sglang_flips import flip_everywhere
from canary_obs.bench.shared_core import take_core
from canary_obs.engines.sglang.plugin import register as register_canary
from canary_obs.engines.sglang.scheduler_canary import (
    attach_to_scheduler,
    canary_of,
    detach_from_scheduler,
)
from canary_obs.records import StartSweep
from canary_obs.runtime.canary import CanaryRuntime

METHOD = "kv_canary_bench"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SWEEP_AFTER = 8  # steps of a load


class StepTimes:
    """Of one scheduler, since the last `clear`."""

    def __init__(self, runtime: CanaryRuntime | None) -> None:
        self._runtime = runtime
        # Began at (s), mode, requests, under a sweep, the canary's clocks.
        self.steps: list[tuple[float, str, int, bool, dict[str, float]]] = []
        self.sweep_due = False

    def note(self, batch: Any) -> None:
        """A step begins."""
        if self.sweep_due and len(self.steps) >= _SWEEP_AFTER and self._runtime is not None:
            self.sweep_due = False
            self._runtime.sweeper.request(StartSweep(id=f"bench-{time.time_ns():x}"), self._runtime.run.step)
        sweeping = self._runtime is not None and self._runtime.sweeper.running
        clocks = {} if self._runtime is None else dict(self._runtime.overhead)
        self.steps.append((time.perf_counter(), batch.forward_mode.name, len(batch.reqs), sweeping, clocks))


def register() -> None:
    """Register the hooks of the bench and, where its switches are set, those of the canary."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_canary()
    setattr(Scheduler, METHOD, _command)
    HookRegistry.register(f"{_SCHEDULER}.run_batch", _timed, HookType.AROUND)


def _timed(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    times = vars(scheduler).get("kv_canary_times")
    if times is not None:
        times.note(batch)
    return original(scheduler, batch, *args, **kwargs)


def _command(scheduler: Any, what: str, path: str, seed: int = 0) -> None:
    """Write the answer to a file: `collective_rpc` returns nothing."""
    if torch.cuda.is_available():
        # With the overlap loop one step more than was asked for may be under way, and writes a slot.
        torch.cuda.synchronize()
    given = canary_of(scheduler)
    runtime = None if given is None else given.runtime
    if what == "begin":
        scheduler.kv_canary_times = times = StepTimes(runtime)
        times.sweep_due = bool(seed)
        answer: Any = {} if runtime is None else dict(runtime.overhead)
    elif what == "end":
        times = vars(scheduler).pop("kv_canary_times")
        answer = {"steps": times.steps, "hooks": {} if runtime is None else dict(runtime.overhead)}
        if runtime is not None and (sweep := runtime.sweeper.last) is not None:
            answer["sweep"] = {"status": sweep.status.value, "checked": sweep.checked, "error": sweep.error}
    elif what in ("pause", "resume"):
        answer = {}
        if runtime is not None:
            _hold(runtime, held=what == "pause")
        if what == "resume":
            launch_as_alone()
            take_core(seed)
    elif what == "detach":
        detach_from_scheduler(scheduler)
        answer = {}
    elif what == "attach":
        attach_to_scheduler(scheduler, f"bench {os.getpid()}")
        answer = _report(canary_of(scheduler))
    elif what == "facts":
        answer = _facts(scheduler)
    elif what == "flips":
        assert given is not None, "only the protected engine is asked"
        answer = flip_everywhere(scheduler, given, seed)
    else:
        answer = _report(given)
    part = Path(f"{path}.part")
    part.write_text(json.dumps(answer), "utf-8")
    part.replace(path)


def _hold(runtime: CanaryRuntime, *, held: bool) -> None:
    """While held, an idle engine's canary does nothing on the device, where another engine is measured."""
    if held:
        vars(runtime)["idle"] = bool  # no more to do, by a call that runs no Python
    else:
        vars(runtime).pop("idle", None)


def _facts(scheduler: Any) -> dict[str, Any]:
    """Classes and sizes of what is measured."""
    import sglang

    runner = scheduler.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    parts = {"tree": scheduler.tree_cache, "pool": pool, "allocator": runner.token_to_kv_pool_allocator}
    return {
        "sglang": str(sglang.__version__),
        "classes": {name: type(part).__name__ for name, part in parts.items()},
        "slots": int(runner.max_total_num_tokens),
        "layers": len(getattr(pool, "full_kv_pool", pool).k_buffer),
        "overlap": bool(scheduler.enable_overlap),
        "protected": bool((given := canary_of(scheduler)) and given.runtime),
        "plugins": os.environ.get("KV_CANARY_MODE", "none"),
    }


def _report(given: Any) -> dict[str, Any]:
    """What the canary of this engine checked and found; why there is none."""
    if given is None or given.runtime is None:
        refusal = None if given is None else given.refusal
        return {"protected": False, "refusal": None if refusal is None else refusal.reason}
    given.runtime.check_everything()
    return {"protected": True} | canary_counts(given.runtime)
