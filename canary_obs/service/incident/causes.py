"""Likely causes of an incident: the classes of faults whose first signal is the incident's."""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from importlib.resources import files

import msgspec

from canary_obs.hub.incidents import Incident
from canary_obs.service.incident.facts import lead_of

CAUSES_SHOWN = 5
BIT_FLIP = "bit flip"


class FaultClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class of real KV cache faults, of tests/fault_cases; `finds` is "phase reason" of its first step."""

    title: str
    place: str
    story: str
    finds: tuple[str, ...]
    reports: tuple[str, ...]


class LikelyCause(msgspec.Struct, frozen=True, kw_only=True):
    """A class that fits; `exact` = its first signal in our tests is this incident's, no more and no less."""

    title: str
    place: str
    story: str
    exact: bool
    reports: tuple[str, ...]


@cache
def fault_classes() -> tuple[FaultClass, ...]:
    """All classes, as `python -m tests.fault_cases.classes` wrote them."""
    content = files("canary_obs.service").joinpath("fault_classes.json").read_bytes()
    return msgspec.json.decode(content, type=tuple[FaultClass, ...])


def likely_causes(incident: Incident) -> tuple[LikelyCause, ...]:
    """The classes that fit the first step's findings, best first; a phase may differ, a reason may not."""
    signals = first_signals(incident)
    if not signals:
        return ()
    single_bit = _is_single_bit(incident)
    ranked = sorted(
        (-_fit(signals, one) - (single_bit is True and one.title == BIT_FLIP), number, one)
        for number, one in enumerate(fault_classes())
        if _reasons(set(one.finds)) & _reasons(signals)
        if not (single_bit is False and one.title == BIT_FLIP)
    )
    return tuple(
        LikelyCause(
            title=one.title, place=one.place, story=one.story, exact=set(one.finds) == signals,
            reports=one.reports,
        )
        for _, _, one in ranked[:CAUSES_SHOWN]
    )  # fmt: skip


def first_signals(incident: Incident) -> set[str]:
    """ "phase reason" of the findings in the first step of the rank that reported first."""
    facts = lead_of(incident)
    if facts is None:
        return set()
    events = (*incident.first, *incident.latest)
    rows = [event.violation for event in events if event.identity == facts.event.identity]
    return {f"{row.phase.value} {row.reason.value}" for row in rows if row.step == facts.row.step}


def _fit(signals: Set[str], one: FaultClass) -> float:
    """0 to 2: agreement of phases with reasons, and of reasons alone."""
    return _overlap(signals, set(one.finds)) + _overlap(_reasons(signals), _reasons(set(one.finds)))


def _overlap(mine: Set[str], other: Set[str]) -> float:
    return len(mine & other) / len(mine | other)


def _reasons(signals: Set[str]) -> set[str]:
    return {signal.partition(" ")[2] for signal in signals}


def _is_single_bit(incident: Incident) -> bool | None:
    """Whether exactly one bit changed; None = no changed word is known."""
    facts = lead_of(incident)
    if facts is None or not facts.changed:
        return None
    differences = [int(word.original or "0", 16) ^ int(word.current or "0", 16) for word in facts.changed]
    return sum(bits.bit_count() for bits in differences) == 1
