"""A rank's own name for the incident that its findings belong to."""

from __future__ import annotations

from canary_obs.config import ServiceConfig
from canary_obs.incident_names import NAMES_KEPT, is_name
from canary_obs.runtime.report.incident_namer import QUIET_SECONDS, IncidentNamer

NOON = 1_700_000_000_000_000_000  # 2023-11-14T22:13:20Z


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def namer() -> tuple[IncidentNamer, Clock]:
    clock = Clock()
    return IncidentNamer(clock, lambda: NOON), clock


def test_names_say_when_and_are_unique() -> None:
    (one, _), (other, _) = namer(), namer()
    names = {one.found(), other.found()}
    assert len(names) == 2
    assert all(name.startswith("20231114T221320Z-") and is_name(name) for name in names)


def test_findings_that_follow_each_other_have_one_name() -> None:
    names, clock = namer()
    first = names.found()
    clock.now += QUIET_SECONDS
    assert names.found() == first
    clock.now += QUIET_SECONDS + 1.0
    second = names.found()
    assert second != first
    assert names.names == (first, second)


def test_damage_that_is_met_again_keeps_the_name() -> None:
    names, clock = namer()
    first = names.found()
    for _ in range(5):
        clock.now += QUIET_SECONDS - 1.0
        names.seen_again()
    assert names.found() == first


def test_what_is_met_again_later_does_not_bring_a_name_back() -> None:
    names, clock = namer()
    first = names.found()
    clock.now += QUIET_SECONDS + 1.0
    names.seen_again()
    assert names.found() != first


def test_an_acknowledgement_ends_the_incident() -> None:
    names, _ = namer()
    first = names.found()
    names.acknowledged()
    names.seen_again()
    assert names.found() != first


def test_the_latest_names_are_kept() -> None:
    names, _ = namer()
    given = []
    for _ in range(NAMES_KEPT + 3):
        given.append(names.found())
        names.acknowledged()
    assert names.names == tuple(given[3:])


def test_a_rank_waits_as_long_as_the_service_does_by_default() -> None:
    assert ServiceConfig().incident_quiet_seconds == QUIET_SECONDS
