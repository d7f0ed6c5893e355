"""How the metrics of taint are read from a rank: absent where the engine does not report them."""

from __future__ import annotations

from collections.abc import Iterator

from canary_obs.hub.ranks import RankView
from canary_obs.telemetry.readings import Reading


def requests(rank: RankView) -> Iterator[Reading]:
    """Requests that read damage, by group and completeness."""
    for group, counts in ((rank.totals.tainted_requests if rank.totals else None) or {}).items():
        for completeness, count in counts.items():
            yield (group, completeness.value), float(count)


def unknown(rank: RankView) -> Iterator[Reading]:
    """Damages whose readers are not all known, by group."""
    for group, count in ((rank.totals.taint_unknown if rank.totals else None) or {}).items():
        yield (group,), float(count)
