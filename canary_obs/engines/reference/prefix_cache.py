"""The radix cache as sweeps read it, group by group."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import CachedCount, CachedSlots
from canary_obs.engines.reference.full_group import FULL
from canary_obs.engines.reference.groups import ReferenceGroup
from canary_obs.engines.reference.swa_group import SWA, SwaGroup
from canary_obs.errors import UnsupportedEngine


class RadixPrefixCache(PrefixCache):
    """The radix cache, group by group."""

    def __init__(self, groups: dict[str, ReferenceGroup]) -> None:
        self._groups = groups

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot in the cache; starts the period that `still_cached` refers to."""
        return named(self._groups, group).cached(unlocked_only=unlocked_only)

    def count(self, group: str) -> CachedCount:
        """What the engine counts as slots come and go."""
        return named(self._groups, group).count()

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: cached, without a break, since this group's last `cached` call."""
        return named(self._groups, group).still_cached(slots)

    def swa_resident(self, group: str, slots: Tensor) -> Tensor | None:
        """bool [n]: the token has a sliding-window slot as well; True for groups other than `full`."""
        swa = self._groups.get(SWA)
        if not isinstance(swa, SwaGroup):
            return None
        return swa.resident(slots) if group == FULL else torch.ones_like(slots, dtype=torch.bool)


def named(groups: dict[str, ReferenceGroup], name: str) -> ReferenceGroup:
    """One group. Raises UnsupportedEngine for a name that this engine does not have."""
    if name not in groups:
        raise UnsupportedEngine(
            f"group {name!r}: the reference engine has {', '.join(groups)}; name one of them"
        )
    return groups[name]
