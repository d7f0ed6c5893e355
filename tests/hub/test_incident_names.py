"""Incidents have the names that the logs of their ranks give them."""

from __future__ import annotations

import pytest

from canary_obs.hub.incident_store import OTHER_NAMES_KEPT, IncidentStore
from canary_obs.incident_names import NAMES_KEPT, is_name
from tests.service.fakes import identity

A, B, C = "20261124T020000Z-aaaaaa", "20261124T020100Z-bbbbbb", "20261124T020200Z-cccccc"
NOON = 1_700_000_000_000_000_000
ME, PEER, STRANGER = identity(0), identity(1), identity(0, instance="another")


@pytest.fixture
def store() -> IncidentStore:
    return IncidentStore(3, 60.0, lambda: NOON)


def names_of(store: IncidentStore) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.id, each.other_names) for each in store.newest_first()]


def found_as(store: IncidentStore, name: str) -> str | None:
    incident = store.find(name)
    return None if incident is None else incident.id


def test_an_incident_has_the_name_in_the_log_of_the_rank_that_reported_first(store: IncidentStore) -> None:
    assert store.open_for(ME, 0.0, (A,)) == A
    assert store.open_for(ME, 1.0, (A,)) == A
    assert names_of(store) == [(A, ())]


def test_it_is_found_under_the_names_in_the_logs_of_other_ranks(store: IncidentStore) -> None:
    store.open_for(ME, 0.0, (A,))
    assert store.open_for(PEER, 0.0, (B,)) == A
    assert names_of(store) == [(A, (B,))]
    assert found_as(store, B) == A


def test_a_service_that_restarted_gives_it_the_same_name(store: IncidentStore) -> None:
    # Both incidents of the rank were known to the last service; their findings come in one message.
    assert store.open_for(ME, 0.0, (A, B)) == B
    assert found_as(store, A) == B


def test_a_rank_that_goes_on_after_the_service_closed_it(store: IncidentStore) -> None:
    store.open_for(ME, 0.0, (A,))
    store.tick(61.0)
    assert store.open_for(ME, 62.0, (A,)) == f"{A}-2"
    store.tick(200.0)
    assert store.open_for(ME, 201.0, (A,)) == f"{A}-3"
    assert found_as(store, A) == A


def test_the_name_of_another_engines_incident_is_not_used(store: IncidentStore) -> None:
    store.open_for(ME, 0.0, (A,))
    other = store.open_for(STRANGER, 0.0, (A,))
    assert is_name(other)
    assert other != A
    assert names_of(store) == [(other, ()), (A, ())]


@pytest.mark.parametrize("name", ["", "latest", A.upper(), A + "0", A + "\n", "../" + A, "x" * 100])
def test_a_name_of_another_form_is_not_used(store: IncidentStore, name: str) -> None:
    opened = store.open_for(ME, 0.0, (name,))
    assert is_name(opened)
    assert opened != name
    assert found_as(store, name) is None


def test_a_rank_without_a_name(store: IncidentStore) -> None:
    assert is_name(store.open_for(ME, 0.0))


def test_names_are_forgotten_with_their_incident(store: IncidentStore) -> None:
    store.open_for(ME, 0.0, (A, A, B, B))
    assert names_of(store) == [(B, (A,))]
    for number in range(3):
        store.tick(100.0 * number + 61.0)
        store.open_for(ME, 100.0 * number + 62.0)
    assert (found_as(store, A), found_as(store, B)) == (None, None)
    assert store.open_for(STRANGER, 400.0, (A,)) == A


def test_the_number_of_names_is_limited(store: IncidentStore) -> None:
    names = [f"20261124T020000Z-{number:06x}" for number in range(2 * OTHER_NAMES_KEPT)]
    store.open_for(ME, 0.0, (C,))
    store.open_for(ME, 0.0, tuple(names))
    assert names_of(store) == [(C, tuple(names[-NAMES_KEPT:]))]
    for name in names:
        store.open_for(ME, 0.0, (name,))
    ((_, kept),) = names_of(store)
    assert len(kept) == OTHER_NAMES_KEPT
