"""Serves requests on one real vLLM, with faults or without, and says who was listed as tainted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from canary_obs.healing.guard_rail import Limits
from canary_obs.hub.taint_store import TaintStore
from canary_obs.records import Tainted
from canary_obs.vocabulary import HealPolicy
from tests.engines.vllm.heal.faults import Faults
from tests.engines.vllm.heal.requests import Answer, Ask
from tests.engines.vllm.real.rig import Rig

IN_FLIGHT = 8
_STEPS_PER_FAULT = 12


@dataclass(slots=True, kw_only=True)
class Listing:
    """A damage that a request was listed for."""

    damage: int
    step: int  # whose tokens are the first that the scheduler can hold back
    first_output: int | None
    derived: bool
    reason: str
    planted: int | None  # the step of the last fault in its block, or in the request's table; None = none


@dataclass(slots=True, kw_only=True)
class Served:
    """One run."""

    answers: dict[str, Answer] = field(default_factory=dict)
    listed: dict[str, list[Listing]] = field(default_factory=dict)  # by request, oldest first
    unknown: int = 0  # damages whose readers are not all known
    damages: int = 0
    causes: list[str] = field(default_factory=list)
    planted: dict[str, int] = field(default_factory=dict)
    scheduled: int = 0  # tokens put through the model
    accepted: int = 0  # drafted tokens
    steps: int = 0
    seconds: float = 0.0
    state: str = ""
    faults: dict[str, int] = field(default_factory=dict)  # of the observer
    heals: dict[str, int] = field(default_factory=dict)  # "action outcome": how often
    limited: str | None = None  # why healing did less than was asked for
    found_after: dict[str, list[int]] = field(default_factory=dict)  # by kind of fault: steps to detection


def serve(
    rig: Rig,
    requests: list[Ask],
    *,
    seed: int | None,
    kind: type[Faults] = Faults,
    most: int | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> Served:
    """Keep IN_FLIGHT requests running until all are answered.

    `seed`: of the faults, None = no faults. `most`: so many of them at most.
    """
    from vllm import SamplingParams

    served, taints = Served(), TaintStore()
    faults = None if seed is None else kind(rig, seed)
    draw, waiting, begun = random.Random(seed), list(reversed(requests)), dict[str, float]()
    engine = rig.llm.llm_engine
    restore = _listen(rig, served, taints, faults)
    before, sent = _heals(rig), dict[str, list[int]]()
    started = time.monotonic()
    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and len(begun) - len(served.answers) < IN_FLIGHT:
                ask = waiting.pop()
                sampling = SamplingParams(temperature=0, max_tokens=ask.tokens, ignore_eos=True)
                engine.add_request(ask.name, {"prompt_token_ids": list(ask.prompt)}, sampling)
                begun[ask.name] = time.monotonic()
            if faults is not None:
                faults.settle(served.steps)
                due = draw.random() < 1 / _STEPS_PER_FAULT
                if due and (most is None or faults.planted.total() < most):
                    faults.plant(served.steps)
            before_step(served.steps)
            for output in engine.step():
                steps = sent.setdefault(output.request_id, [])
                fresh = len(output.outputs[0].token_ids) - len(steps)
                steps += [served.steps] * fresh
                served.accepted += max(0, fresh - 1)
                if output.finished:
                    served.answers[output.request_id] = _answer(output, begun, served.steps, steps)
            served.steps += 1
            if faults is not None:
                _match(rig, served, faults)
        served.seconds = time.monotonic() - started
        if faults is not None:
            faults.settle(None)
            served.planted = dict(faults.planted)
        rig.step()
        rig.settle()
    finally:
        restore()
    kept = taints.after(0)
    served.damages = len(kept)
    served.causes = sorted({taint.cause for taint in kept if taint.cause is not None})
    served.unknown = sum(taint.cause is not None for taint in kept)
    served.state = rig.canary.verdict()[0].value
    served.faults = dict(rig.canary.health.faults)
    served.heals = {what: count - before.get(what, 0) for what, count in _heals(rig).items()}
    served.limited = rig.canary.healing.status.why
    return served


def under(rig: Rig, policy: HealPolicy) -> None:
    """Let healing follow this policy, with an empty cache and nothing in quarantine."""
    # A fault every twelfth step is a flood by the limits that suit a service: whole pools leave in a minute.
    rig.canary.healing._limits = Limits(1_000_000, 1_000.0)
    rig.canary.healing.choose(policy)
    rig.canary.healing.release(None)
    for seed in (1, 2):  # the scheduler hears of it, and answers
        rig.generate([[4 + seed] * 8], tokens=1)
    rig.fresh()


def _heals(rig: Rig) -> dict[str, int]:
    return {
        f"{action} {outcome}": count
        for action, outcomes in rig.canary.healing.counts.items()
        for outcome, count in outcomes.items()
        if count
    }


def _match(rig: Rig, served: Served, faults: Faults) -> None:
    """Count for each fault how many steps it took until its block was found damaged, or misread."""
    size = rig.adapter.vllm_groups[0].block_slots
    found = {violation.slot // size for violation in rig.found}
    rig.found.clear()
    for place in [one for one in faults.places if one[2] in found]:
        faults.places.remove(place)
        kind, step, _ = place
        served.found_after.setdefault(kind, []).append(served.steps - 1 - step)


def _answer(output: Any, begun: dict[str, float], step: int, sent: list[int]) -> Answer:
    own = output.outputs[0]
    error = None if own.finish_reason == "length" else str(own.finish_reason)
    seconds = time.monotonic() - begun[output.request_id]
    return Answer(tokens=list(own.token_ids), error=error, seconds=seconds, step=step, sent=sent)


def _listen(rig: Rig, served: Served, taints: TaintStore, faults: Faults | None) -> Callable[[], None]:
    """Take what the rank would send a service, and count what its scheduler hands out."""
    taint, worker = rig.canary.taint, rig.worker
    # With asynchronous scheduling the tokens of the forward before are on their way already.
    ahead = int(rig.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    send, execute = taint.send, worker.execute_model
    drafts = {name for name, group in rig.adapter._by_name.items() if group.draft}

    def listen(message: Tainted) -> bool:
        taints.add(message, "incident")
        if message.group in drafts:  # the target verifies what they propose: it makes no answer wrong
            return bool(send(message))
        block = message.slot // rig.adapter.vllm_groups[0].block_slots
        for one in message.requests:
            name = one.request.rsplit("-", 1)[0]
            own = served.listed.setdefault(name, [])
            misled = None if faults is None else faults.misled.get(name)
            before = next((listing for listing in reversed(own) if listing.damage == message.number), None)
            # What a wrong table entry leads to counts as known damage where the block has some already.
            if before is None or (misled is not None and misled > before.step):
                fault = None if faults is None else faults.planted_in(block)
                own.append(
                    Listing(
                        damage=message.number, step=served.steps + ahead, first_output=one.first_output,
                        derived=one.derived, reason=message.reason.value,
                        planted=fault if before is None else misled,
                    )
                )  # fmt: skip
            elif one.first_output is not None and before.first_output is not None:
                before.first_output = min(before.first_output, one.first_output)
        send(message)
        return True

    def counted(output: Any, *args: Any, **kwargs: Any) -> Any:
        served.scheduled += output.total_num_scheduled_tokens
        return execute(output, *args, **kwargs)

    taint.send, worker.execute_model = listen, counted

    def restore() -> None:
        taint.send, worker.execute_model = send, execute

    return restore
