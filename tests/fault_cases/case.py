"""One class of KV cache fault: where the bug lives, who reported it, and what the canary must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fault_cases.stage import Stage

Change = Callable[["Stage"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """A fault is planted by changing the engine, never the canary's records."""

    title: str
    place: str  # part of the engine that is wrong
    story: str  # what it does wrong
    reports: tuple[str, ...]  # public threads that describe it
    plant: Change
    finds: tuple[str, ...] = ()  # "phase reason" of the first step with violations, sorted; () = missed
    latency: int = 0  # steps from the fault to the first violation
    elsewhere: str = "nothing"  # what else would notice
    missed: str = ""  # why the canary cannot see it
    harmless: str = ""  # why the outputs stay as they were
    furnish: Change | None = None  # what the engine needs for it to happen; the clean run has it too
    engine: dict[str, object] = field(default_factory=dict)  # changes to the tiny preset; "model": its kind
