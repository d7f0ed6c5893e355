"""Requests from their admission to their end, and what is forgotten of them."""

from __future__ import annotations

import numpy as np

RUNNING = np.iinfo(np.int64).max  # as the last forward of a request that runs
_FIRST_CAPACITY = 256


class Lives:
    """A request that comes back after a preemption begins another life, under the same name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.prompts: list[int] = []
        self.emitted: list[int | None] = []  # tokens, when it ended; None = not known
        self.last = np.empty(_FIRST_CAPACITY, dtype=np.int64)  # forward that it was in; RUNNING
        self.running: dict[str, int] = {}  # life by name

    def __len__(self) -> int:
        return len(self.names)

    def begin(self, name: str, prompt: int) -> int:
        """The number of a new life."""
        number = len(self.names)
        if number == self.last.size:
            self.last = np.concatenate([self.last, np.empty_like(self.last)])
        self.last[number] = RUNNING
        self.names.append(name)
        self.prompts.append(prompt)
        self.emitted.append(None)
        self.running[name] = number
        return number

    def end(self, name: str, step: int, emitted: int | None) -> int | None:
        """It was last in forward `step`; returns its life, None = no such request ran."""
        number = self.running.pop(name, None)
        if number is not None:
            self.last[number], self.emitted[number] = step, emitted
        return number

    def keep(self, kept: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Forget all lives but these (ascending), which are numbered anew."""
        self.names = [self.names[number] for number in kept]
        self.prompts = [self.prompts[number] for number in kept]
        self.emitted = [self.emitted[number] for number in kept]
        self.last[: kept.size] = self.last[kept]
        renumbered = {int(old): new for new, old in enumerate(kept)}
        self.running = {name: renumbered[number] for name, number in self.running.items()}
