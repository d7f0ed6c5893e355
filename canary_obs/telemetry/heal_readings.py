"""Readings of what healing may do and has done."""

from __future__ import annotations

from collections.abc import Iterator

from canary_obs.heals import HealStatus
from canary_obs.hub.ranks import RankView
from canary_obs.telemetry.readings import Reading, one
from canary_obs.vocabulary import HealPolicy


def actions(rank: RankView) -> Iterator[Reading]:
    for action, outcomes in (rank.totals.heals if rank.totals else {}).items():
        for outcome, count in outcomes.items():
            yield (action.value, outcome.value), float(count)


def policy(rank: RankView) -> Iterator[Reading]:
    if (status := _healing(rank)) is not None:
        for each in HealPolicy:
            yield (each.value,), float(each is status.effective)


def limited(rank: RankView) -> Iterator[Reading]:
    status = _healing(rank)
    return one(None if status is None else status.policy is not status.effective)


def pool_blocks(rank: RankView) -> Iterator[Reading]:
    status = _healing(rank)
    return one(status.pool_blocks if status is not None and status.pool_blocks else None)


def quarantined(rank: RankView) -> Iterator[Reading]:
    status = _healing(rank)
    return one(None if status is None else len(status.quarantined))


def _healing(rank: RankView) -> HealStatus | None:
    return rank.snapshot.healing if rank.snapshot else None
