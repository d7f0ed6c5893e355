"""The requests of a run, the same ones in every run of a seed, and what became of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

VOCABULARY = 1024
_FAMILIES, _SHARED, _OWN, _TOKENS = 12, (32, 200), (4, 60), (4, 48)
_REPEATED = 0.3  # of the requests ask what an earlier one has asked, and a little more


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One greedy request."""

    name: str
    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """Its tokens, as they were delivered; `error`: it ended otherwise than by its length."""

    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    step: int = -1  # when it ended
    sent: list[int] = field(default_factory=list)  # by token: in which step it was delivered
    behind: list[float] = field(default_factory=list)  # by token, if some differ: the best one's lead
    wrong_from: int | None = None  # the first token that is wrong


def asks(count: int, seed: int) -> list[Ask]:
    """Prompts of a few families that share their beginnings, and follow-ups of earlier ones."""
    draw = random.Random(seed)
    common = [_ids(draw, draw.randint(*_SHARED)) for _ in range(_FAMILIES)]
    made: list[Ask] = []
    for number in range(count):
        if made and draw.random() < _REPEATED:
            before = draw.choice(made[-40:]).prompt[:400]
        else:
            before = draw.choice(common)
        prompt = (*before, *_ids(draw, draw.randint(*_OWN)))
        made.append(Ask(name=f"{seed}.{number}", prompt=prompt, tokens=draw.randint(*_TOKENS)))
    return made


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(4, VOCABULARY) for _ in range(count))
