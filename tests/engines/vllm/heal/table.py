"""Compares a run with faults with one without, request by request."""

from __future__ import annotations

import statistics
from typing import Any

from tests.engines.vllm.heal.requests import Answer
from tests.engines.vllm.heal.serve import Served


def row_of(clean: Served, again: Served, faulty: Served) -> dict[str, Any]:
    """The numbers that count. `again`: a second run without faults, which ought to be equal to the first."""
    wrong = {name for name, right in clean.answers.items() if _differs(right, faulty.answers[name])}
    errors = {name for name, answer in faulty.answers.items() if answer.error is not None}
    delivered, listed = wrong - errors, set(faulty.listed)
    late = [one for one in delivered & listed if _first_wrong(clean, faulty, one) < _from(faulty, one)]
    known = [name for name in delivered & listed if faulty.listed[name].step < faulty.answers[name].step]
    return {
        "requests": len(clean.answers),
        "faults": dict(sorted(faulty.planted.items())),
        "damages": faulty.damages,
        "damages_unknown": faulty.unknown,
        "unknown_causes": faulty.causes,
        "wrong_delivered": len(delivered),
        "wrong_delivered_after_listing": len(known),
        "wrong_not_listed": sorted(delivered - listed),
        "wrong_before_first_output": sorted(late),
        "correct_listed": len((listed - wrong) & set(clean.answers)),
        "listed": len(listed),
        "listed_derived": sum(one.derived for one in faulty.listed.values()),
        "ended_with_error": len(errors),
        "recomputed_tokens": faulty.scheduled - clean.scheduled,
        "median_latency_ms": [_median(clean), _median(faulty)],
        "seconds": [round(one.seconds, 1) for one in (clean, again, faulty)],
        "steps": [clean.steps, again.steps, faulty.steps],
        "differing_without_faults": sum(
            _differs(right, again.answers[name]) for name, right in clean.answers.items()
        ),
        "listed_without_faults": len(clean.listed) + len(again.listed),
        "observer_faults": faulty.faults,
    }


def passed(row: dict[str, Any]) -> bool:
    """Acceptance with policy off: whoever is wrong is listed, and nobody is without a fault."""
    return not (
        row["wrong_not_listed"] or row["wrong_before_first_output"] or row["differing_without_faults"]
        or row["listed_without_faults"] or row["observer_faults"]
    )  # fmt: skip


def _differs(right: Answer, other: Answer) -> bool:
    return right.tokens != other.tokens


def _first_wrong(clean: Served, faulty: Served, name: str) -> int:
    right, other = clean.answers[name].tokens, faulty.answers[name].tokens
    return next(
        (at for at, pair in enumerate(zip(right, other, strict=False)) if pair[0] != pair[1]), len(other)
    )


def _from(served: Served, name: str) -> int:
    return served.listed[name].first_output or 0


def _median(served: Served) -> float:
    return round(1e3 * statistics.median(answer.seconds for answer in served.answers.values()), 1)
