"""Gives the words of counter rows their names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add

from canary_kernels import layout
from canary_obs.records import GroupCounters
from canary_obs.vocabulary import Cause, Phase, Reason

_PHASES, _REASONS = tuple(Phase), tuple(Reason)
_CAUSES = tuple(Cause)[: layout.NUM_UNVERIFIED]


def counter_rows(counters: Sequence[int], side_counters: Sequence[int]) -> list[list[int]]:
    """[groups][COUNTER_WORDS]: the sum of two lists [groups * COUNTER_WORDS].

    Violations are those of `counters` alone: what the side stream counts is unconfirmed.
    """
    # Lists: the engine's thread pays for this four times a second, and every call of torch costs more.
    width, lanes = layout.COUNTER_WORDS, layout.NUM_LANES
    return [
        [
            *counters[start : start + lanes],
            *map(add, counters[start + lanes : start + width], side_counters[start + lanes : start + width]),
        ]
        for start in range(0, len(counters), width)
    ]


def named_counters(row: Sequence[int], findings: Sequence[int], redetections: Sequence[int]) -> GroupCounters:
    """The counters of one group by name: `row` is [COUNTER_WORDS], the others are [NUM_LANES]."""
    # By zip and slices: a third of what indexing takes.
    phases, causes = len(_PHASES), len(_CAUSES)
    runs, verified, hashed = layout.COUNT_RUNS, layout.COUNT_VERIFIED, layout.COUNT_HASHED
    first, last = layout.COUNT_UNVERIFIED, layout.COUNT_WRITTEN
    return GroupCounters(
        runs=dict(zip(_PHASES, row[runs : runs + phases], strict=True)),
        verified=dict(zip(_PHASES, row[verified : verified + phases], strict=True)),
        hashed=dict(zip(_PHASES, row[hashed : hashed + phases], strict=True)),
        unverified={cause: sum(row[first + code : last : causes]) for code, cause in enumerate(_CAUSES)},
        written=row[layout.COUNT_WRITTEN],
        completed=row[layout.COUNT_COMPLETED],
        violations=_by_phase(tuple(findings)),
        redetections=_by_reason(tuple(redetections)),
        loads_compared=row[layout.COUNT_LOADS_COMPARED],
        loads_left_out=row[layout.COUNT_LOADS_LEFT_OUT],
    )


@lru_cache(maxsize=128)
def _by_phase(lanes: tuple[int, ...]) -> dict[Phase, dict[Reason, int]]:
    # Cached, as lanes hardly ever change between snapshots; callers must not change the result.
    reasons = len(_REASONS)
    starts = range(0, len(lanes), reasons)
    return {
        phase: dict(zip(_REASONS, lanes[start : start + reasons], strict=True))
        for phase, start in zip(_PHASES, starts, strict=True)
    }


@lru_cache(maxsize=128)
def _by_reason(lanes: tuple[int, ...]) -> dict[Reason, int]:
    return {reason: sum(lanes[code :: len(_REASONS)]) for code, reason in enumerate(_REASONS)}
