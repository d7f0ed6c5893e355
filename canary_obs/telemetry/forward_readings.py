"""How metrics of forwards, and of how their checks were launched, are read from a rank."""

from __future__ import annotations

from collections.abc import Iterator

from canary_obs.hub.ranks import RankView
from canary_obs.telemetry.readings import Reading, by_name, one


def forwards(rank: RankView) -> Iterator[Reading]:
    return by_name((rank.totals.forwards if rank.totals else None) or {})


def forwards_checked(rank: RankView) -> Iterator[Reading]:
    return by_name((rank.totals.forwards_checked if rank.totals else None) or {})


def captures(rank: RankView) -> Iterator[Reading]:
    return by_name((rank.totals.captures if rank.totals else None) or {})


def replays(rank: RankView) -> Iterator[Reading]:
    return one(rank.totals.replays if rank.totals else None)
