"""Many healing actions on reference engines of all kinds of groups.

python -m tests.engines.reference.heal.storm 10000 RESULT.json

Slots of running requests and of the prefix cache are reported as damaged although they are not, while
requests are preempted, aborted and prefilled in chunks, and the prefix cache is emptied. Exit code 1 when
a request is left waiting, something is held afterwards, or the canary has had a fault.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.healing.guard_rail import Limits
from canary_obs.records import Violation
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.vocabulary import HealPolicy, Part, Phase, Reason
from tests.engines.reference.heal.serve import leaks, prompts

MODELS = ("llama", "mla_sparse", "host_tier", "speculative", "swa", "compressed")
_UNLIMITED = Limits(10**9, 1_000.0)
_ACTIONS_PER_ENGINE = 240
_REQUESTS, _MOST_STEPS = 12, 4000
_OF_REQUESTS = (Reason.CHAIN, Reason.POSITION, Reason.TOKEN, Reason.UNWRITTEN)


def endure(model: str, actions: int, seed: int = 3) -> dict[str, Any]:
    """Rounds of requests and false findings until so many actions were done."""
    engine = Engine(settings.with_model(settings.tiny(seed=3, page_size=4, max_running=6), model))
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, patrol_budget="1B/s"))
    assert canary is not None
    canary.healing._limits = _UNLIMITED
    canary.mark_ready()
    storm, began, stuck = Storm(engine, canary, seed), time.monotonic(), None
    try:
        while stuck is None and sum(n for (_, how), n in noted(canary).items() if how == "done") < actions:
            stuck = storm.round()
        why = canary.healing.status.why
        engine.idle()  # what was found last may be quarantined
        canary.healing.release(None)
        engine.idle()
        out = [*canary.healing.status.quarantined, *withdrawn(engine)]
        found = noted(canary)
        faults = dict(canary.health.faults)
    finally:
        canary.detach()
    storm.empty_cache()
    return {
        "model": model,
        "actions": {" ".join(what): count for what, count in sorted(found.items())},
        "events": dict(sorted(storm.events.items())) | storm.counted(),
        "seconds": round(time.monotonic() - began, 1),
        "healing": why,
        "stuck": stuck,
        "still_out": len(out),
        "observer_faults": faults,
        "left": [*leaks(engine), *differences(engine)],
    }


def noted(canary: Any) -> Counter[tuple[str, str]]:
    """How often each action had each outcome."""
    return Counter(
        {
            (action.value, outcome.value): count
            for action, outcomes in canary.healing.counts.items()
            for outcome, count in outcomes.items()
            if count
        }
    )


def withdrawn(engine: Engine) -> list[int]:
    """Pages, window slots and rows that are not handed out."""
    used = engine.scheduler
    pools = [used.allocator] if used.windows is None else [used.allocator, used.windows.slots.pool]
    return [*used.withdrawn_rows, *(int(page) for pool in pools for page in np.flatnonzero(pool.withdrawn))]


def differences(engine: Engine) -> list[str]:
    """What an engine that serves nothing and caches nothing holds, beyond one that was just made."""
    fresh, found = Engine(engine.config).scheduler, []
    used = engine.scheduler
    for name, pool, clean in (
        ("pages", used.allocator, fresh.allocator),
        *(
            [("window slots", used.windows.slots.pool, fresh.windows.slots.pool)]
            if fresh.windows and used.windows
            else []
        ),
    ):
        free, expected = sorted(pool._stack[: pool.free_pages]), sorted(clean._stack[: clean.free_pages])
        if free != expected or pool.withdrawn.any():
            found.append(f"{name}: {len(free)} are free, not {len(expected)}")
    if used.cache.size or used.cache.evictable or used.cache.held().size:
        found.append("the prefix cache is not empty")
    if engine.unfinished or used.running or used.waiting or used.withdrawn_rows:
        found.append("requests or withdrawn rows are left")
    return found


class Storm:
    """Traffic and false findings on one engine, from one seed."""

    def __init__(self, engine: Engine, canary: Any, seed: int) -> None:
        self._engine, self._canary, self._draw = engine, canary, random.Random(seed)
        self.events: Counter[str] = Counter()
        self._groups = [view.name for view in canary._adapter.groups]

    def round(self) -> str | None:
        """One batch of requests; why it does not come to an end."""
        engine, draw, number = self._engine, self._draw, self.events["rounds"]
        self.events["rounds"] += 1
        self._canary.healing.choose((HealPolicy.EVICT, HealPolicy.PROTECT)[number % 2])
        for each, (prompt, length) in enumerate(
            prompts(_REQUESTS, draw.randrange(6), engine.config.max_context)
        ):
            engine.add_request(prompt, Sampling(max_tokens=length, stop_at_eos=False), f"{number}-{each}")
        for step in range(_MOST_STEPS):
            if not engine.has_work():
                return None
            engine.step()
            if draw.random() < 0.3:
                self._report(draw.randint(1, 3))
            if draw.random() < 0.02 and engine.unfinished:
                self.events["aborts"] += engine.abort(draw.choice(engine.unfinished).id)
            if draw.random() < 0.01:
                self.empty_cache()
                self.events["resets"] += 1
            if draw.random() < 0.002:  # seldom: the pool is to run short
                self._canary.healing.release(None if step % 2 else self._some_out())
            if engine.scheduler.running and draw.random() < 0.01:
                engine.scheduler.preempt(draw.choice(engine.scheduler.running))
        return f"round {number}: {len(engine.unfinished)} requests after {_MOST_STEPS} steps"

    def empty_cache(self) -> None:
        """Whoever uses what it held keeps it."""
        scheduler = self._engine.scheduler
        for root in scheduler.cache.roots:
            scheduler.cache.discard(root, 0)

    def counted(self) -> dict[str, int]:
        """What the engine counts."""
        statistics = self._engine.statistics
        return {
            "preemptions": statistics.preemptions,
            "failures": statistics.failures,
            "forwards": statistics.forwards,
        }

    def _some_out(self) -> list[int]:
        out = [block for _, block in self._canary.healing.status.quarantined]
        return self._draw.sample(out, len(out) // 2)

    def _report(self, count: int) -> None:
        rows = [row for _ in range(count) if (row := self._false_finding()) is not None]
        canary, step = self._canary, self._canary.step
        canary.taint.found(rows, "storm", step)
        canary.healing.found(rows, canary.taint.reached(), "storm", step)
        self.events["findings"] += len(rows)

    def _false_finding(self) -> Violation | None:
        """Of any kind of check, of a slot that someone may read."""
        draw, adapter = self._draw, self._canary._adapter
        group = draw.choice(self._groups)
        slots = adapter.slots_in_use(group).tolist()
        if not slots:
            return None
        request, reason, position = None, draw.choice((Reason.KV_DATA, Reason.KV_DATA, Reason.RECORD)), None
        phase = draw.choice((Phase.PATROL, Phase.SWEEP, Phase.TAIL))
        if draw.random() < 0.3 and self._engine.scheduler.running:
            one = draw.choice(self._engine.scheduler.running)
            request, reason, phase = one.id, draw.choice(_OF_REQUESTS), Phase.HEAD
            position = draw.randrange(max(1, one.computed))
        return Violation(
            phase=phase, reason=reason, group=group, part=Part.K if reason is Reason.KV_DATA else None,
            step=max(0, self._canary.step - draw.randrange(2)), event=1, slot=draw.choice(slots),
            position=position, request=request, expected=None, actual=None, lag_steps=0, time_ns=0,
            redetection=draw.random() < 0.2,
        )  # fmt: skip


def clean(found: dict[str, Any]) -> bool:
    """Acceptance: no deadlock, no leak, no fault, and healing is still what was asked for."""
    return not (
        found["left"] or found["stuck"] or found["still_out"] or found["observer_faults"] or found["healing"]
    )


def main(actions: int, result: Path) -> int:
    """So many actions over all models together, each engine with its share."""
    torch.set_num_threads(1)
    rows = []
    for model in MODELS:
        for seed in range(-(-actions // (len(MODELS) * _ACTIONS_PER_ENGINE))):
            rows.append({"seed": seed} | endure(model, _ACTIONS_PER_ENGINE, seed))
            print(json.dumps(rows[-1]), flush=True)
    total = sum(n for row in rows for what, n in row["actions"].items() if what.endswith(" done"))
    result.write_text(json.dumps({"actions": total, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(not all(clean(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
