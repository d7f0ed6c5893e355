"""Load for the engine: real text, Poisson arrivals, shared system prompts, conversations, aborts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from canary_obs.reference_engine.scheduling.request import Request, Sampling, Status
from canary_obs.reference_engine.settings import EngineConfig
from canary_obs.reference_engine.tokenizer import encode

Tokens = NDArray[np.int32]
Span = tuple[int, int]  # lowest and highest value, both possible


class Front(Protocol):
    """What takes requests: an engine, or the half of one that prefills."""

    @property
    def config(self) -> EngineConfig:
        """Settings of the engine behind it."""

    def add_request(self, prompt: Tokens, sampling: Sampling) -> Request:
        """Queue a prompt."""

    def abort(self, request_id: str) -> bool:
        """Drop a request. False = not here (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Time is counted in engine steps, so a seed gives the same load on every machine."""

    arrivals: float = 0.32  # new conversations and follow-up prompts per step, on average
    abort_rate: float = 0.02  # probability per step that some unfinished request is aborted
    max_unfinished: int = 20  # arrivals beyond this are refused
    system_prompts: int = 6
    system_tokens: Span = (64, 160)
    user_tokens: Span = (16, 96)
    reply_tokens: Span = (8, 112)
    follow_up_rate: float = 0.7  # probability that a finished conversation goes on
    pause_steps: Span = (1, 60)  # between an answer and the next prompt
    sampled: float = 0.5  # share of conversations with temperature 1; the others are greedy


def scaled_traffic(max_context: int, max_running: int = 16) -> TrafficConfig:
    """A load that keeps an engine full: lengths in proportion to its context, arrivals to its rows."""
    plain, factor = TrafficConfig(), max_context / 512

    def scale(span: Span) -> Span:
        return max(1, round(span[0] * factor)), max(2, round(span[1] * factor))

    return TrafficConfig(
        arrivals=plain.arrivals * max_running / 16 / factor,
        max_unfinished=max(2, plain.max_unfinished * max_running // 16),
        system_tokens=scale(plain.system_tokens),
        user_tokens=scale(plain.user_tokens),
        reply_tokens=scale(plain.reply_tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FollowUp:
    """A conversation that will go on."""

    due: int  # step
    history: Tokens
    temperature: float


class Traffic:
    """Feeds one engine; call `advance` once before each step."""

    def __init__(self, config: TrafficConfig, seed: int) -> None:
        self.config = config
        self._random = np.random.default_rng(seed)
        self._corpus = corpus()
        self._step = 0
        self._open: list[Request] = []
        self._follow_ups: list[FollowUp] = []
        self._systems = [self._text(config.system_tokens, bos=True) for _ in range(config.system_prompts)]

    def advance(self, engine: Front) -> None:
        """One step of simulated time: collect answers, abort, add what arrives."""
        self._collect()
        if self._open and self._random.random() < self.config.abort_rate:
            engine.abort(self._open[self._random.integers(len(self._open))].id)
        for _ in range(self._random.poisson(self.config.arrivals)):
            if len(self._open) < self.config.max_unfinished:
                self._arrive(engine)
        self._step += 1

    def _collect(self) -> None:
        pending = []
        for request in self._open:
            if not request.done:
                pending.append(request)
            elif request.status is Status.FINISHED and self._random.random() < self.config.follow_up_rate:
                self._follow_ups.append(
                    FollowUp(
                        due=self._step + self._within(self.config.pause_steps),
                        history=request.tokens[: request.length].copy(),
                        temperature=request.sampling.temperature,
                    )
                )
        self._open = pending

    def _arrive(self, engine: Front) -> None:
        follow_up = self._next_follow_up(engine.config.max_context)
        if follow_up is None:
            system = self._systems[self._random.integers(len(self._systems))]
            temperature = float(self._random.random() < self.config.sampled)
            follow_up = FollowUp(due=self._step, history=system, temperature=temperature)
        prompt = np.concatenate([follow_up.history, self._text(self.config.user_tokens)])
        sampling = Sampling(
            max_tokens=self._within(self.config.reply_tokens),
            temperature=follow_up.temperature,
            seed=int(self._random.integers(2**31)),
        )
        self._open.append(engine.add_request(prompt, sampling))

    def _next_follow_up(self, max_context: int) -> FollowUp | None:
        """The conversation that is due and has room for another question and answer."""
        longest = max_context - self.config.user_tokens[1] - self.config.reply_tokens[1]
        self._follow_ups = [follow_up for follow_up in self._follow_ups if follow_up.history.size <= longest]
        for index, follow_up in enumerate(self._follow_ups):
            if follow_up.due <= self._step:
                return self._follow_ups.pop(index)
        return None

    def _text(self, span: Span, *, bos: bool = False) -> Tokens:
        size = self._within(span)
        start = self._random.integers(len(self._corpus) - size)
        return encode(self._corpus[start : start + size], bos=bos)[:size]

    def _within(self, span: Span) -> int:
        return int(self._random.integers(span[0], span[1] + 1))


@cache
def corpus() -> str:
    """The text shipped with the engine, white space folded."""
    folder = files("canary_obs.reference_engine") / "corpus"
    return re.sub(r"\s+", " ", (folder / "jargon.txt").read_text(encoding="utf-8"))
