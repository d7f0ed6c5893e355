"""The load of one leg: shared prefixes, aborts, resets, rests."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from canary_obs.records import SweepProgress
from canary_obs.vocabulary import SweepStatus
from tests.engines.vllm.real.rig import Rig

_FAMILIES = 6
_REST_SECONDS = (12.0, 25.0)  # longer than the time between idle sweeps
_BUSY_SECONDS = (15.0, 40.0)
_ABORTS = 0.04  # probability per step
_VOCABULARY = 1024
_REPEATED = (77, 311, 950)


class Load:
    """Keeps one engine busy through its own step loop; `events` counts what happened."""

    def __init__(self, rig: Rig, seed: int, requests: int, repeats: float) -> None:
        self.events: Counter[str] = Counter()
        self._rig, self._requests, self._repeats = rig, requests, repeats
        self._engine = rig.llm.llm_engine
        self._draw = random.Random(seed)
        length = rig.runner.max_model_len
        self._longest = min(600, length - 80)
        self._families = [self._tokens(self._draw.randrange(40, self._longest)) for _ in range(_FAMILIES)]
        self._running: list[str] = []
        self.longest_pause = 0.0  # seconds between two steps of `busy_until`
        self.swept = 0  # slots checked by the largest sweep that passed
        _count_forwards(rig, self.events)
        _count_preemptions(rig, self.events)
        _count_accepted_drafts(rig, self.events)
        self._note_sweeps(rig)

    def busy_until(self, deadline: float) -> None:
        """Load without a pause."""
        ended = now = time.monotonic()
        while now < deadline:
            self._fill()
            self.longest_pause = max(self.longest_pause, time.monotonic() - ended)
            self._step()
            ended = now = time.monotonic()

    def alternate_until(self, deadline: float) -> None:
        """Load and rests in turn; a reset of the prefix cache before every second rest."""
        turn = 0
        while time.monotonic() < deadline:
            self.busy_until(min(deadline, time.monotonic() + self._draw.uniform(*_BUSY_SECONDS)))
            self.drain()
            if turn % 2:
                self._rig.step()  # the scheduler lets go of what has ended
                self.events["resets" if self._rig.llm.reset_prefix_cache() else "refused_resets"] += 1
            turn += 1
            rest = self._draw.uniform(*_REST_SECONDS)
            if time.monotonic() + rest < deadline:
                self.events["rests"] += 1
                time.sleep(rest)

    def counts(self) -> dict[str, int]:
        """What has happened, by event."""
        from tests.engines.vllm.real.copying_connector import LOADS

        return dict(self.events) | {"connector_loads": LOADS["blocks"]}

    def drain(self) -> None:
        """Finish every request."""
        while self._engine.has_unfinished_requests():
            self._step()

    def _note_sweeps(self, rig: Rig) -> None:
        sweeper = rig.canary.sweeper
        report = sweeper._report

        def noted(ended: SweepProgress) -> None:
            if ended.status is SweepStatus.PASSED:
                self.swept = max(self.swept, ended.checked)
            report(ended)

        sweeper._report = noted

    def _fill(self) -> None:
        from vllm import SamplingParams

        while len(self._running) < self._requests:
            request = f"r{self.events['requests']}"
            sampling = SamplingParams(
                temperature=self._draw.choice((0.0, 0.8)),
                max_tokens=self._draw.randrange(1, 60),
                ignore_eos=True,
            )
            self._engine.add_request(request, {"prompt_token_ids": self._prompt()}, sampling)
            self._running.append(request)
            self.events["requests"] += 1

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self.events["finished"] += 1
                self.events["tokens"] += len(output.outputs[0].token_ids)
                self.events["hit_tokens"] += output.num_cached_tokens or 0
                self._running.remove(output.request_id)
        self.events["steps"] += 1
        if self._running and self._draw.random() < _ABORTS:
            request = self._running.pop(self._draw.randrange(len(self._running)))
            self._engine.abort_request([request])
            self.events["aborts"] += 1

    def _prompt(self) -> list[int]:
        family = self._draw.choice(self._families)
        kind = self._draw.random()
        if kind < 0.15:  # a new family takes an old one's place
            self._families[self._draw.randrange(_FAMILIES)] = family = self._tokens(
                self._draw.randrange(40, self._longest)
            )
        if kind > 1.0 - self._repeats:  # the same token again and again
            return [self._draw.choice(_REPEATED)] * self._draw.randrange(20, self._longest)
        kept = family[: self._draw.randrange(1, len(family) + 1)]
        return kept + self._tokens(self._draw.randrange(1, 40))

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(4, _VOCABULARY) for _ in range(count)]


def _count_forwards(rig: Rig, events: Counter[str]) -> None:
    """Of the scheduler's outputs those with tokens, apart from what canary_obs counts."""
    schedule = rig.core.scheduler.schedule
    events["forwards"] = 0

    def counted(*given: Any, **named: Any) -> Any:
        output = schedule(*given, **named)
        events["forwards"] += output.total_num_scheduled_tokens > 0
        return output

    rig.core.scheduler.schedule = counted


def _count_preemptions(rig: Rig, events: Counter[str]) -> None:
    preempt = rig.core.scheduler._preempt_request

    def counted(request: Any, *given: Any, **named: Any) -> Any:
        events["preemptions"] += 1
        return preempt(request, *given, **named)

    rig.core.scheduler._preempt_request = counted


def _count_accepted_drafts(rig: Rig, events: Counter[str]) -> None:
    scheduler = rig.core.scheduler
    update = scheduler.update_from_output

    def counted(scheduled: Any, output: Any) -> Any:
        # Asynchronous scheduling has no lists here yet.
        found = output.sampled_token_ids if isinstance(output.sampled_token_ids, list) else []
        events["drafts_accepted"] += sum(max(0, len(tokens) - 1) for tokens in found)
        return update(scheduled, output)

    scheduler.update_from_output = counted
