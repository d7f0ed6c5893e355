"""A small engine under traffic with a canary inside, and the handles that a planted fault needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.records import Violation, Violations
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.cache.pool import PageAllocator
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.scheduling.scheduler import Plan
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.transport.links import LocalLink
from tests.fault_cases.case import Change, FaultCase
from tests.links import OneThreadLink

if TYPE_CHECKING:
    from tests.fault_cases.mover import Mover

SEED, STEPS, RIPE = 5, 140, 40
# As in CI (mode raise): all that a forward reads is compared right after it. The sweep sees the rest.
CANARY = CanaryConfig(
    endpoint=IN_PROCESS, prefix_data=True, verify_on_hit=True, sweep_interval=10, sweep_budget_ms=1000,
    idle_sweep=False, patrol_budget="off", lane_rows=512, write_history=False,
)  # fmt: skip

Answers = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # request: prompt, output


class Stage:
    """One engine. A plant changes its methods; `strike` tells when the fault took effect."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.canary: CanaryRuntime | None = None  # attached last: it wraps an engine that is broken already
        self.runner, self.scheduler = engine.runner, engine.scheduler
        self.pool, self.cache, self.page = engine.runner.pool, engine.scheduler.cache, engine.config.page_size
        self.struck: int | None = None
        self.mover: Mover | None = None
        self.random = np.random.default_rng(SEED)

    @property
    def warm(self) -> bool:
        """Whether the engine has warmed up: faults may take effect."""
        return self.engine.statistics.steps >= RIPE

    @property
    def ripe(self) -> bool:
        """Whether the engine has warmed up and the fault is still to come."""
        return self.warm and self.struck is None

    @property
    def forward(self) -> int:
        """The forward under way, else the next one; counted from 1."""
        return self.engine.statistics.steps + 1

    def strike(self) -> None:
        """The fault takes effect in, or right before, this forward; the first time counts."""
        if self.struck is None:
            self.struck = self.forward

    def around(self, owner: object, name: str, hook: Callable[..., Any]) -> None:
        """Replace a method by hook(original, *arguments)."""
        original = getattr(owner, name)
        vars(owner)[name] = lambda *given, **named: hook(original, *given, **named)

    def spoil(self, owner: object, name: str, hook: Callable[..., Any]) -> None:
        """Once the engine is warm, every call of a method is hook(original, *arguments), and a fault."""

        def call(original: Callable[..., Any], *given: Any) -> Any:
            if not self.warm:
                return original(*given)
            self.strike()
            return hook(original, *given)

        self.around(owner, name, call)

    def damage(self, harm: Callable[[Tensor], bool | None]) -> None:
        """Between scheduling and forward, harm slots (int64 [n]) that a decoding request is about to read.

        False = nothing done this time; else the fault took effect.
        """

        def schedule(original: Callable[[], Plan]) -> Plan:
            plan = original()
            victims = [r for r in self.veterans(shortest=24) if r in plan.requests]
            if self.ripe and victims and harm(torch.from_numpy(victims[0].slots[:24].copy())) is not False:
                self.strike()
            return plan

        self.around(self.scheduler, "schedule", schedule)

    def key_of(self, request: Request) -> int:
        """What sets requests apart in the prefix cache beyond their tokens."""
        return request.serial % 2

    def trust_every_free(self) -> None:
        """An allocator without the checks that would stop the engine, as production engines have it."""
        allocator = self.scheduler.allocator
        allocator._stack = np.concatenate([allocator._stack, allocator._stack])
        self.around(allocator, "free", lambda _, slots: _push(allocator, slots))

    def trust_every_slot(self) -> None:
        """Kernels that take a slot of -1 for slot 0, as GPU kernels with a null page do."""
        for store in self.pool.stores:
            self.around(store, "read", lambda read, slots: read(slots.clamp(min=0)))
            self.around(store, "write", lambda write, slots, *given: write(slots.clamp(min=0), *given))

    def decoding(self, batch: ForwardBatch, shortest: int = 1) -> list[int]:
        """Requests of a batch that add one token to a prefix of at least `shortest` tokens."""
        pairs = zip(batch.extends, batch.prefixes, strict=True)
        return [i for i, (extend, prefix) in enumerate(pairs) if extend == 1 and prefix >= shortest]

    def veterans(self, shortest: int = 1, own: int = 0) -> list[Request]:
        """Running requests that will decode for some steps yet: computed and own tokens at least these."""
        return [
            request
            for request in self.scheduler.running
            if request.computed >= max(1, shortest)
            and request.computed - request.shared >= own
            and request.remaining == 1
            and request.sampling.max_tokens - len(request.output) > 3
        ]


def _push(allocator: PageAllocator, slots: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    pages = slots[:: allocator.page_size] // allocator.page_size
    allocator._is_free[pages] = True
    allocator._stack[allocator._depth : allocator._depth + pages.size] = pages
    allocator._depth += pages.size


def changed(batch: ForwardBatch, **columns: Tensor) -> ForwardBatch:
    """A batch with other tensors in it."""
    return replace(batch, **columns)  # type: ignore[arg-type]


def edited(column: Tensor, index: int | slice, value: int | Tensor) -> Tensor:
    """A copy of a column with a value at an index."""
    column = column.clone()
    column[index] = value
    return column


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run said and found."""

    answers: Answers
    struck: int | None
    violations: list[Violation]

    @property
    def finds(self) -> tuple[str, ...]:
        """Phase and reason of what the first step with violations showed, sorted."""
        first = min((violation.step for violation in self.violations), default=0)
        return tuple(sorted({f"{v.phase} {v.reason}" for v in self.violations if v.step == first}))

    @property
    def latency(self) -> int | None:
        """Steps from the fault to the first violation."""
        if self.struck is None or not self.violations:
            return None
        return min(violation.step for violation in self.violations) - self.struck

    def differences(self, other: Outcome) -> int:
        """Requests with the same prompt and another output."""
        both = self.answers.keys() & other.answers.keys()
        pairs = [(self.answers[name], other.answers[name]) for name in both]
        return sum(mine[0] == theirs[0] and mine[1] != theirs[1] for mine, theirs in pairs)


def clean(case: FaultCase) -> Outcome:
    """The same engine and traffic without the fault."""
    return _clean(case.furnish, tuple(sorted(case.engine.items())))


@cache
def _clean(furnish: Change | None, changes: tuple[tuple[str, object], ...]) -> Outcome:
    return _perform(dict(changes), furnish, None, None)


def broken(case: FaultCase) -> Outcome:
    """The engine with the fault in it, until it was found and has changed an answer, or to the end."""
    return _perform(case.engine, case.furnish, case.plant, clean(case))


def _perform(
    changes: dict[str, object], furnish: Change | None, plant: Change | None, reference: Outcome | None
) -> Outcome:
    torch.manual_seed(SEED)
    sizes = {name: value for name, value in changes.items() if name != "model"}
    model = str(changes.get("model", "llama"))
    engine = Engine(settings.with_model(settings.tiny(seed=SEED, **sizes), model))
    stage = Stage(engine)
    if furnish is not None:
        furnish(stage)
    if plant is not None:
        stage.trust_every_free()
        plant(stage)
    link = OneThreadLink(capacity=1 << 20)
    canary = stage.canary = install_canary(engine, CANARY, link=link)
    assert canary is not None
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), SEED)
    outcome = Outcome(answers={}, struck=None, violations=[])
    while engine.statistics.steps < STEPS:
        traffic.advance(engine)
        for request in engine.step():
            prompt = request.tokens[: request.prompt_length]
            outcome.answers[request.id] = tuple(prompt.tolist()), tuple(request.output.tolist())
        outcome.violations.extend(received(link))
        if reference is not None and outcome.violations and outcome.differences(reference):
            break
    canary.check_everything()
    assert not canary.health.faults
    canary.detach()
    return replace(outcome, struck=stage.struck, violations=outcome.violations + received(link))


def received(link: LocalLink) -> list[Violation]:
    """Violations that arrived since the last call."""
    found: list[Violation] = []
    while (message := link.next_message(0.0)) is not None:
        if isinstance(message, Violations):
            found += message.rows
    return found
