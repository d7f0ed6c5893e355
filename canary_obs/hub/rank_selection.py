"""Which ranks a command of an operator is for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.records import RankKey


class UnknownRank(CanaryError):
    """A command names ranks that the service does not know."""

    def __init__(self, unknown: str, known: list[str]) -> None:
        self.unknown, self.known = unknown, known
        super().__init__(f"no rank matches {unknown}; there are: {', '.join(known) or 'none'}")


class RankSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks by the parts of their keys. None, and no numbers = any."""

    engine: str | None = None
    instance: str | None = None
    ranks: tuple[int, ...] = ()

    def matches(self, key: RankKey) -> bool:
        """Whether a rank is selected."""
        engine, instance, rank = key
        return self.matches_instance(engine, instance) and (not self.ranks or rank in self.ranks)

    def matches_instance(self, engine: str, instance: str) -> bool:
        """Whether ranks of this engine instance can be selected."""
        return self.engine in (None, engine) and self.instance in (None, instance)

    def of(self, keys: Iterable[RankKey]) -> list[RankKey]:
        """The selected ones of these keys, sorted. Raises UnknownRank for a part that none of them has."""
        known = sorted(keys)
        if not known:
            return []
        selected = [key for key in known if self.matches(key)]
        numbers = {rank for _, _, rank in selected}
        if missing := [f"rank {number}" for number in self.ranks if number not in numbers]:
            raise UnknownRank(", ".join(missing) + self._scope(), ["/".join(map(str, key)) for key in known])
        if not selected:
            raise UnknownRank(self._scope().strip(), ["/".join(map(str, key)) for key in known])
        return selected

    def _scope(self) -> str:
        named = [f"engine {self.engine}"] * (self.engine is not None)
        named += [f"instance {self.instance}"] * (self.instance is not None)
        return f" of {', '.join(named)}" if named else ""


EVERY_RANK = RankSelection()
