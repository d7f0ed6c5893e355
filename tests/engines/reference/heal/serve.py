"""Serves the same requests on a reference engine, with faults or without, and says who was listed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.healing.guard_rail import Limits
from canary_obs.heals import Heal, HealStatus
from canary_obs.records import Tainted
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling, Status
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy
from tests.engines.reference.heal.faults import Faults

IN_FLIGHT = 8
_UNLIMITED = Limits(1_000_000, 1_000.0)  # limits are another test's
_STEPS_PER_FAULT, _FAMILIES, _REPEATED = 12, 12, 0.3
_PATROLLED = 2 / 3  # of the steps


@dataclass(slots=True, kw_only=True)
class Listing:
    """A request that was listed."""

    first_output: int | None
    derived: bool
    alive: bool  # it had not ended yet, some time that it was listed since it was last computed again
    step: int  # the last one in which it was listed before its end
    later: list[tuple[int, int]] = field(default_factory=list)  # found after its end: planted, first output


@dataclass(slots=True, kw_only=True)
class Served:
    """One run."""

    model: str
    prompts: dict[str, np.ndarray] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)  # by request and token: in which step
    errors: set[str] = field(default_factory=set)
    seconds_of: list[float] = field(default_factory=list)
    listed: dict[str, Listing] = field(default_factory=dict)
    damages: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    planted: dict[str, int] = field(default_factory=dict)
    steps_to_find: list[int] = field(default_factory=list)  # from planting bytes to the first listing
    heals: list[Heal] = field(default_factory=list)
    healed_at: list[int] = field(default_factory=list)  # by heal: the step before which it was reported
    status: HealStatus | None = None
    tokens: int = 0  # put through the model
    steps: int = 0
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)  # of the observer
    leaked: list[str] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)  # tokens that a request computed again had sent
    ghosts: set[str] = field(default_factory=set)  # listed as running after their end

    def actions(self, outcome: HealOutcome) -> Counter[HealAction]:
        return Counter(heal.action for heal in self.heals if heal.outcome is outcome)


def prompts(count: int, seed: int, longest: int) -> list[tuple[np.ndarray, int]]:
    """Token ids and answer lengths: families that share their beginnings, and follow-ups of earlier ones."""
    draw = random.Random(seed)
    ids = lambda size: [draw.randrange(4, 200) for _ in range(size)]  # noqa: E731
    common = [ids(draw.randint(longest // 8, longest // 3)) for _ in range(_FAMILIES)]
    made: list[tuple[np.ndarray, int]] = []
    for _ in range(count):
        before = common[draw.randrange(_FAMILIES)]
        if made and draw.random() < _REPEATED:
            before = draw.choice(made[-40:])[0].tolist()[: longest // 2]
        prompt = np.array(before + ids(draw.randint(2, longest // 6)), dtype=np.int32)
        made.append((prompt, draw.randint(4, 24)))
    return made


def engine_of(model: str, **changes: object) -> Engine:
    """A small engine of this kind, with the weights of all others."""
    return Engine(settings.with_model(settings.tiny(seed=3, **({"page_size": 4} | changes)), model))


def serve(
    count: int, *, model: str = "llama", policy: str = "off", faults: int | None = None, seed: int = 1,
    engine: dict[str, object] | None = None, most: int | None = None, **changes: object,
) -> Served:  # fmt: skip
    """Keep IN_FLIGHT requests running until all are answered.

    `faults`: a seed, None = no faults. `most`: so many of them at most.
    """
    runner = engine_of(model, **(engine or {}))
    given = {"endpoint": IN_PROCESS, "verify_on_hit": True, "patrol_budget": "1B/s"}
    canary = install_canary(runner, CanaryConfig(**given, **changes))  # type: ignore[arg-type]
    assert canary is not None
    canary.healing._limits = _UNLIMITED
    canary.healing.choose(HealPolicy(policy))
    canary.mark_ready()
    served, harm = Served(model=model), None if faults is None else Faults(runner, canary._adapter, faults)
    _listen(canary, runner, served, harm)
    waiting = list(enumerate(prompts(count, seed, runner.config.max_context)))[::-1]
    draw, began, started = random.Random(faults), dict[str, float](), time.monotonic()
    try:
        while waiting or runner.has_work():
            while waiting and len(runner.unfinished) < IN_FLIGHT:
                number, (prompt, length) = waiting.pop()
                sampling = Sampling(max_tokens=length, stop_at_eos=False)
                began[f"r{number}"], served.prompts[f"r{number}"] = time.monotonic(), prompt
                runner.add_request(prompt, sampling, f"r{number}")
            if harm is not None:
                harm.settle(served.steps)
                due = draw.random() < 1 / _STEPS_PER_FAULT
                if due and (most is None or harm.planted.total() < most):
                    harm.plant(served.steps)
            pace(canary, draw)
            ended = runner.step()
            for request in (*runner.unfinished, *ended):
                steps = served.sent.setdefault(request.id, [])
                steps += [served.steps] * (len(request.output) - len(steps))
            for request in ended:
                served.answers[request.id] = request.output.tolist()
                served.seconds_of.append(time.monotonic() - began[request.id])
                if request.status is Status.FAILED:
                    served.errors.add(request.id)
            served.steps += 1
        served.seconds, served.tokens = time.monotonic() - started, runner.statistics.tokens
        if harm is not None:
            harm.settle(None)
            served.planted = dict(harm.planted)
        canary.check_everything()
        runner.idle()
        served.faults, served.status = dict(canary.health.faults), canary.healing.status
    finally:
        canary.detach()
    served.leaked = leaks(runner)
    return served


def pace(canary: Any, draw: random.Random) -> None:
    """Let the patrol check a chunk in two of three steps: by its own clock no run is like another."""
    canary.patrol._credit = 1.0 if draw.random() < _PATROLLED else -1e15


def late(clean: Served, served: Served) -> set[str]:
    """Requests that got a wrong token after they were known to have read damage.

    Not those that were cured of it, and then read what was planted later and found after their end; nor
    those that kept what they had sent when they were cured, if that is wrong by what was found after it.
    """
    found = set()
    for name in set(served.listed) - served.errors:
        right, own = clean.answers[name], served.answers[name]
        first = next((at for at, (a, b) in enumerate(zip(right, own, strict=True)) if a != b), None)
        listing, kept = served.listed[name], served.kept.get(name, 0)
        if first is None or not (listing.alive or first < kept):
            continue
        since = listing.step if listing.alive else 0
        new = (
            since <= planted <= served.sent[name][first] and output <= first
            for planted, output in listing.later
        )
        if (listing.alive and first < kept) or not any(new):
            found.add(name)
    return found


def leaks(engine: Engine) -> list[str]:
    """What an idle engine holds that the prefix cache does not account for."""
    scheduler, found = engine.scheduler, []
    cache, page = scheduler.cache, engine.config.page_size
    expected = scheduler.allocator.num_pages - cache.held().size // page
    if scheduler.allocator.free_pages != expected:
        found.append(f"{scheduler.allocator.free_pages} pages are free, not {expected}")
    if cache.evictable != cache.size or cache.locked.any() or cache.detached.any():
        found.append("slots are locked or detached")
    if sorted(scheduler._rows) != list(range(engine.config.max_running)):
        found.append(f"free rows: {scheduler._rows}")
    if scheduler.windows is not None:
        slots = scheduler.windows.slots
        resident = int(slots.resident(cache.held()).sum())
        if slots.locks.any() or slots.free_slots + resident != engine.config.swa_slots:
            found.append("window slots are locked or lost")
    return found


def _listen(canary: Any, engine: Engine, served: Served, harm: Faults | None) -> None:
    """Take what the rank would send a service."""
    taint, healing = canary.taint, canary.healing
    send, report = taint.send, healing._send
    known: set[int] = set()
    readings: set[tuple[int, str, int]] = set()

    def listen(message: Tainted) -> bool:
        if message.number not in known:
            known.add(message.number)
            served.damages += 1
            if message.cause is not None:
                served.causes[message.cause] += 1
            for place in harm.places if harm is not None else ():
                if (place.group, place.slot) == (message.group, message.slot):
                    served.steps_to_find.append(served.steps - place.step)
        unfinished = {request.id for request in engine.unfinished}
        faults = harm.places if harm is not None else []
        place = message.group, message.slot
        planted = max((one.step for one in faults if (one.group, one.slot) == place), default=None)
        for one in message.requests:
            if one.running and one.request not in unfinished:
                served.ghosts.add(one.request)
            reading = message.number, one.request, one.step
            cured = not one.running and one.outputs == 0  # it started again before it sent anything of it
            alive = one.request in unfinished and reading not in readings and not cured
            readings.add(reading)
            before = served.listed.get(one.request)
            if before is None:
                before = served.listed[one.request] = Listing(
                    first_output=one.first_output, derived=one.derived, alive=False, step=-1
                )
            if alive:
                before.alive, before.step = True, served.steps
            elif planted is not None and one.request not in unfinished and one.first_output is not None:
                before.later.append((planted, one.first_output))
            if one.first_output is not None and before.first_output is not None:
                before.first_output = min(before.first_output, one.first_output)
        send(message)
        return True

    def healed(heals: Sequence[Heal]) -> None:
        served.heals += heals
        served.healed_at += [served.steps] * len(heals)
        sent = {request.id: len(request.output) for request in engine.unfinished}
        for heal in heals:
            if heal.action is HealAction.RECOMPUTE and heal.outcome is HealOutcome.DONE:
                assert heal.request is not None
                served.kept[heal.request] = sent.get(heal.request, 0)
                if heal.request in served.listed:
                    served.listed[heal.request].alive = False
        report(heals)

    taint.send, healing._send = listen, healed
