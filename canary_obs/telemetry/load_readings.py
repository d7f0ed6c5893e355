"""How the metrics of KV that a connector loaded are read from a rank."""

from __future__ import annotations

from collections.abc import Iterator

from canary_obs.hub.ranks import RankView
from canary_obs.telemetry.readings import Reading


def loads_compared(rank: RankView) -> Iterator[Reading]:
    for name, counters in rank.totals.groups.items() if rank.totals else ():
        yield (name,), float(counters.loads_compared)


def loads_left_out(rank: RankView) -> Iterator[Reading]:
    for name, counters in rank.totals.groups.items() if rank.totals else ():
        yield (name,), float(counters.loads_left_out)
