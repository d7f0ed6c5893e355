"""Faults in the scheduler of a running SGLang, and what its own canary and ours say of them.

An entry point of `sglang.srt.plugins`. Each command is a call of the scheduler's method `kv_canary_fault`
between two steps, by SGLang's own `collective_rpc`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from canary_obs.demo.in_process_vllm import draw_weights
from canary_obs.engines.sglang.plugin import register as register_canary
from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler, canary_of, detach_from_scheduler
from canary_obs.records import Violation
from tests.engines.sglang.real.differential import compared
from tests.engines.sglang.real.planted import DECODED
from tests.engines.sglang.real.rig import decoding
from tests.engines.sglang.real.sglang_canary import OwnLog

METHOD = "kv_canary_fault"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_DRAIN_SECONDS = 5.0


def register() -> None:
    """Register the hooks of the canary, and the one that plants."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_canary()
    setattr(Scheduler, METHOD, _command)
    HookRegistry.register(f"{_SCHEDULER}.process_input_requests", _turn, HookType.AROUND)


class Planting:
    """One scheduler, as faults expect an engine, and the fault that is next."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.runner = scheduler, scheduler.tp_worker.model_runner
        self.table = self.runner.req_to_token_pool.req_to_token
        self.own = OwnLog()
        self.own.__enter__()
        self._found: list[Violation] = []
        self._fault: Any = None
        self._due: int | None = None  # the scheduler's number of the batch by which both have spoken
        self.outcome: dict[str, Any] | None = None
        self.renew()

    @property
    def adapter(self) -> Any:
        """Our canary's."""
        return self._given.adapter

    @property
    def _given(self) -> Any:
        given = canary_of(self.scheduler)
        assert given is not None
        assert given.runtime is not None, given.refusal and given.refusal.reason
        return given

    def renew(self) -> bool:
        """Empty the engine's cache, and attach a canary that knows nothing of earlier faults."""
        detach_from_scheduler(self.scheduler)
        emptied = bool(self.scheduler.flush_cache())
        attach_to_scheduler(self.scheduler, "differential")
        keep = self._given.runtime.delivery.deliver

        def deliver(found: list[Violation]) -> None:
            self._found += found
            keep(found)

        self._given.runtime.delivery.deliver = deliver
        self._fault = self._due = self.outcome = None
        self._found.clear()
        self.own.lines.clear()
        return emptied

    def arm(self, fault: Any) -> None:
        """Plant it now, or as soon as three requests decode."""
        self._fault = fault
        if fault.cached:
            self._plant()

    def turn(self, turns: int) -> None:
        """The loop turns; nothing is launched in between."""
        if self._fault is not None and self.running(3, DECODED):
            self._plant(turns)
        elif self._due is not None and self.scheduler.forward_ct >= self._due:
            synchronize()
            self._due, runtime = None, self._given.runtime
            runtime.check_everything()
            runtime.delivery.drain(_DRAIN_SECONDS)
            theirs, ours, unnamed = compared(self.own.lines, self._found)
            assert self.outcome is not None
            self.outcome |= {"theirs": theirs, "ours": ours, "unnamed": unnamed}
            state, reasons = runtime.verdict()
            self.outcome |= {"state": [state.value, *reasons], "faults": runtime.health.faults.total()}

    def running(self, count: int = 2, at_least: int = 12) -> list[Any]:
        """Requests that decode now."""
        return decoding(self.scheduler, count, at_least)

    def _plant(self, turns: int = 8) -> None:
        synchronize()
        self.outcome = {"before": len(self.own.lines) + len(self._found)}  # of a sound engine
        fault, self._fault = self._fault, None
        self._due = self.scheduler.forward_ct + turns
        with torch.inference_mode():
            fault.plant(self)
        synchronize()


def synchronize() -> None:
    """Wait for the device, so that nothing reads what is changed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _turn(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from tests.engines.sglang.real.faults import TURNS

    result = original(scheduler, *args, **kwargs)
    planting = vars(scheduler).get("kv_canary_planting")
    if planting is not None:
        planting.turn(TURNS)
    return result


def _command(scheduler: Any, what: str, path: str, fault: str = "") -> None:
    """Write the answer to a file: `collective_rpc` returns nothing."""
    from tests.engines.sglang.real.faults import FAULTS

    synchronize()
    if what == "start":
        answer = _start(scheduler)
    elif what == "renew":
        answer = {"emptied": scheduler.kv_canary_planting.renew()}
    elif what == "arm":
        scheduler.kv_canary_planting.arm(next(found for found in FAULTS if found.name == fault))
        answer = {}
    else:
        answer = {"outcome": scheduler.kv_canary_planting.outcome}
    part = Path(f"{path}.part")
    part.write_text(json.dumps(answer), "utf-8")
    part.replace(path)


def _start(scheduler: Any) -> dict[str, Any]:
    import sglang

    runner = scheduler.tp_worker.model_runner
    draw_weights(runner.model)  # with dummy ones all tokens are alike
    scheduler.kv_canary_planting = Planting(scheduler)
    return {
        "sglang": str(sglang.__version__),
        "pool": type(runner.token_to_kv_pool).__name__,
        "tree": type(scheduler.tree_cache).__name__,
        "overlap": bool(scheduler.enable_overlap),
        "device": str(runner.req_to_token_pool.req_to_token.device),
    }
