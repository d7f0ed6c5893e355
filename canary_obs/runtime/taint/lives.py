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
        self.drafting = False  # a request may have computed more tokens than `emitted` says
        self._ended: dict[str, int] = {}  # the last one, by name of a request that does not run
        self._before: dict[int, int] = {}  # by life that goes on from another one: that
        self._after: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def begin(self, name: str, prompt: int, emitted: int | None = None) -> int:
        """The number of a new life. `emitted`: by the request that it goes on; None = by none or unknown."""
        number = len(self.names)
        if number == self.last.size:
            self.last = np.concatenate([self.last, np.empty_like(self.last)])
        self.last[number] = RUNNING
        self.names.append(name)
        self.prompts.append(prompt)
        self.emitted.append(None)
        self.running[name] = number
        before = self._ended.pop(name, None)
        if before is not None and emitted is not None:
            self._before[number], self._after[before] = before, number
            self.emitted[before] = emitted  # without tokens that were dropped
        return number

    def end(self, name: str, step: int, emitted: int | None) -> int | None:
        """It was last in forward `step`; returns its life, None = no such request ran."""
        number = self.running.pop(name, None)
        if number is not None:
            self.last[number], self.emitted[number] = step, emitted
            self._ended[name] = number
        return number

    def up_to(self, life: int) -> list[int]:
        """This life of a request and those before it, latest first."""
        found = [life]
        while (before := self._before.get(found[-1])) is not None:
            found.append(before)
        return found

    def emitted_before(self, life: int) -> int | None:
        """Tokens that its request had emitted when it began; None = not known."""
        before = self._before.get(life)
        if before is not None:
            return self.emitted[before]
        return None if self.names[life] in self.names[:life] else 0

    def extent(self, life: int) -> int:
        """Tokens that it computes for certain; of one that has ended, the most that it may have computed."""
        if self.last[life] == RUNNING:
            return self.prompts[life]
        emitted = self.emitted[life]
        # How many of its last drafted tokens were accepted is not known when a request ends.
        return RUNNING if emitted is None or self.drafting else self.prompts[life] + max(0, emitted - 1)

    def latest(self, life: int) -> int:
        """The last life of the same request."""
        while (after := self._after.get(life)) is not None:
            life = after
        return life

    def keep(self, kept: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Forget all lives but these (ascending), which are numbered anew."""
        self.names = [self.names[number] for number in kept]
        self.prompts = [self.prompts[number] for number in kept]
        self.emitted = [self.emitted[number] for number in kept]
        self.last[: kept.size] = self.last[kept]
        renumbered = {int(old): new for new, old in enumerate(kept)}
        self.running = {name: renumbered[number] for name, number in self.running.items()}
        self._ended = {name: renumbered[one] for name, one in self._ended.items() if one in renumbered}
        self._before = {
            renumbered[one]: renumbered[before]
            for one, before in self._before.items()
            if one in renumbered and before in renumbered
        }
        self._after = {before: one for one, before in self._before.items()}
