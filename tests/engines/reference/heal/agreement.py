"""One fault in two runs that are alike until healing acts: what a dry run says of it, and `protect` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from canary_obs.heals import Heal
from tests.engines.reference.heal.serve import serve

REQUESTS = 12


class Pair(NamedTuple):
    """Actions by step, of the first step in which there were any, and of all later ones."""

    fault: dict[str, int]
    said: list[tuple[object, ...]]
    done: list[tuple[object, ...]]
    said_later: list[tuple[object, ...]]
    done_later: list[tuple[object, ...]]


def pair(model: str, seed: int) -> Pair:
    """Raises AssertionError where a run did something else than its policy says, or failed."""
    runs = []
    for policy in ("dry_run", "protect"):
        served = serve(REQUESTS, model=model, policy=policy, faults=seed, seed=seed, most=1)
        assert served.status is not None
        assert (served.status.effective.value, served.faults, served.leaked) == (policy, {}, [])
        runs.append(served)
    assert runs[0].planted == runs[1].planted
    (said, said_later), (done, done_later) = (_split(one.healed_at, one.heals) for one in runs)
    return Pair(runs[0].planted, said, done, said_later, done_later)


def _split(
    steps: Sequence[int], heals: Sequence[Heal]
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    what = [
        (
            step, heal.action.value, heal.group, heal.block, heal.request, heal.blocks, heal.forwards,
            None if heal.reason is None else heal.reason.value,
        )
        for step, heal in zip(steps, heals, strict=True)
    ]  # fmt: skip
    return [one for one in what if one[0] == what[0][0]], [one for one in what if one[0] != what[0][0]]
