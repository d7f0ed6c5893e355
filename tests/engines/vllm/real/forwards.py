"""Forwards of a real vLLM that are not shown to the canary: what it says, when, and whom it accuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from canary_obs.records import Acknowledge
from canary_obs.runtime.report.snapshot import current_health_inputs
from canary_obs.vocabulary import State
from tests.engines.vllm.real.rig import Rig, prompts

NOT_SHOWN = "forwards were not shown or not checked"
PATIENCE = 10.0


@contextmanager
def without(owner: Any, *names: str) -> Iterator[None]:
    """The owner's wrapped methods are its own again."""
    wrapped = {name: vars(owner).pop(name) for name in names if name in vars(owner)}
    assert wrapped
    try:
        yield
    finally:
        vars(owner).update(wrapped)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, getattr(owner, name))
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def ways(rig: Rig) -> dict[str, Callable[[], Any]]:
    """Context managers by way; each takes forwards from the canary while it is entered."""
    hooks, canary = rig.adapter.hooks, rig.canary
    found: dict[str, Callable[[], Any]] = {
        "the forward's hook is not called, the step's is": lambda: replaced(
            hooks, "begin_forward", lambda build: None
        ),
        "hooks never reach the canary": lambda: without(
            rig.runner, "execute_model", "_model_forward", "prepare_attn"
        ),
        "a forward's last checks are not launched": lambda: replaced(
            canary.checks, "tail", lambda: None
        ),
    }  # fmt: skip
    if (drafts := rig.adapter._drafts) is not None:

        def end(observer: Any) -> None:
            del observer
            drafts._view = None

        # Drafting is known to be under way: no patrol comes before it.
        own = {"a draft pass is not shown": lambda: replaced(drafts, "end", end)}
        return own if canary.state.groups[-1].name == "draft" else found
    return found


def acknowledge(rig: Rig) -> None:
    """Leave what was found up to now out of later verdicts."""
    rig.canary.health.acknowledge(current_health_inputs(rig.canary._sources), Acknowledge())


def tried(rig: Rig, tokens: int = 6) -> dict[str, dict[str, Any]]:
    """Of every way: the verdict, the seconds until it came, and the violations found afterwards."""
    report: dict[str, dict[str, Any]] = {}
    for number, (way, entered) in enumerate(ways(rig).items()):
        rig.fresh()
        rig.generate(prompts(3, seed=5, shared=100), tokens)
        rig.settle()
        acknowledge(rig)
        assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
        with entered():
            started = time.monotonic()
            rig.generate(prompts(3, seed=50 + number, shared=100), tokens)
            while (verdict := rig.canary.verdict())[0] is State.OK:
                assert time.monotonic() - started < PATIENCE, way
                time.sleep(0.01)
            seconds = time.monotonic() - started
        # Blocks written meanwhile are read, reused, swept and patrolled.
        rig.generate(prompts(3, seed=50 + number, shared=100), tokens)
        accused = [repr(violation) for violation in rig.settle()]
        acknowledge(rig)
        report[way] = {
            "state": str(verdict[0]), "reasons": list(verdict[1]), "seconds": seconds, "accused": accused,
        }  # fmt: skip
    rig.fresh()
    return report
