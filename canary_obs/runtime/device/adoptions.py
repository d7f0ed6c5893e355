"""How often the records of slots were declared unknown, or changed by other launches than a forward's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Adoptions:
    """How often slots of any group were adopted, or met by other launches than those of a forward."""

    count: int = 0  # each time a baseline has to be taken
    others: int = 0  # launches, not of a forward, that change records or read counters
    baselines: Counter[int] = field(default_factory=Counter)  # launched for bytes that arrived, by group
