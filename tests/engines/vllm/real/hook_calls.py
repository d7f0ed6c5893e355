"""Counts the calls that the canary's hooks make per decode step, as a GPU's host makes them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

import canary_kernels
import canary_obs
from canary_obs.runtime import step_scheduler
from canary_obs.runtime.device import replays

_OWN = tuple(each.__path__[0] for each in (canary_obs, canary_kernels))
_HOOKS = {
    "attach_reports": "scheduler", "cache_full_blocks": "scheduler",
    "follow_output": "adapter", "_built": "adapter",
    "catch_up": "later", "settle": "later",  # once a forward was launched
    "before_write": "head", "forward_launched": "head", "after_forward": "tail", "after_step": "between",
}  # fmt: skip
_REST = "around"  # wrappers of the engine's methods, apart from the hooks that they call
HOOKS = ("scheduler", "adapter", "head", "later", "tail", "between", _REST)


class HookCalls:
    """Calls of Python and of C, by hook, of steps that run inside `counting`."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.c: Counter[str] = Counter()
        self.names: Counter[tuple[str, str]] = Counter()  # by hook and function
        self._hook: str | None = None  # under way
        self._stack: list[tuple[str | None, int]] = []  # of the callers, by frame: hook, launches left out
        self._left_out = 0
        self._known: dict[CodeType, bool] = {}  # whether it is the canary's

    @property
    def total(self) -> dict[str, int]:
        """Of both kinds, by hook."""
        return {hook: self.python[hook] + self.c[hook] for hook in HOOKS}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is called on this thread."""
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._stack.clear()
            self._hook, self._left_out = None, 0

    def _called(self, frame: FrameType, event: str, given: Any) -> None:
        if event == "call":
            self._stack.append((self._hook, self._left_out))
            self._enter(frame.f_code)
        elif event == "return":
            if self._stack:
                self._hook, self._left_out = self._stack.pop()
        elif event == "c_call" and self._hook is not None and not self._left_out:
            self.c[self._hook] += 1
            self.names[self._hook, getattr(given, "__qualname__", repr(given))] += 1

    def _enter(self, code: CodeType) -> None:
        own = self._known.get(code)
        if own is None:
            own = self._known[code] = code.co_filename.startswith(_OWN)
        if own:
            if self._hook in (None, _REST):
                self._hook = _HOOKS.get(code.co_name, _REST)
        elif self._hook == _REST or "/vllm/" in code.co_filename:
            self._hook = None  # the engine's own method that a wrapper calls, or what decorates it
        if self._hook is not None and not self._left_out:
            self.python[self._hook] += 1
            self.names[self._hook, code.co_qualname] += 1
        if code is _replay_code:
            self._left_out = 1


def _replayed(launch: Callable[[], None]) -> Callable[[], None]:
    def replay() -> None:
        launch()

    return replay


_replay_code = next(each for each in _replayed.__code__.co_consts if isinstance(each, CodeType))


def as_on_a_gpu(rig: Any, patch: pytest.MonkeyPatch) -> None:
    """Short steps without a sweep, whose launches are one replay before and one after a forward."""
    patch.setattr(replays, "REPEATS", 3)
    patch.setattr(replays, "FORWARDS_WAITED", 0)
    patch.setattr(step_scheduler, "_SECONDS_BETWEEN_TASKS", float("inf"))
    rig.canary.run.paused = True
    scheduler, found = rig.canary._scheduler, rig.canary.checks.replays
    patch.setattr(scheduler, "_rotating", True)
    patch.setattr(found, "_captured", _replayed)


def steps_counted(rig: Any, lengths: list[int], patch: pytest.MonkeyPatch) -> dict[bool, list[HookCalls]]:
    """Calls of 20 steps in which prompts of these lengths decode; whether a request was given a block."""
    scheduled: list[Any] = []
    schedule = rig.core.scheduler.schedule

    def kept(*given: Any, **named: Any) -> Any:
        scheduled.append(schedule(*given, **named))
        return scheduled[-1]

    found: dict[bool, list[HookCalls]] = {False: [], True: []}
    names = [f"{len(lengths)}-{number}" for number in range(len(lengths))]
    rig.start(
        {name: [4 + at] * length for at, (name, length) in enumerate(zip(names, lengths, strict=True))}, 60
    )
    rig.step(10)
    with patch.context() as inner:
        inner.setattr(rig.core.scheduler, "schedule", kept)
        for _ in range(20):
            calls = HookCalls()
            with calls.counting():
                rig.step()
            found[any(map(gives_blocks, scheduled))].append(calls)
            scheduled.clear()
    rig.llm.llm_engine.abort_request(names)
    rig.step(2)
    return found


def gives_blocks(output: Any) -> bool:
    """Whether a scheduler output gives a block to a request that goes on."""
    return any(output.scheduled_cached_reqs.new_block_ids)
