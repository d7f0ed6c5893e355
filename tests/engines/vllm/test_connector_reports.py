"""What a worker's connector says of its loads: a fault of the canary stays there, a violation does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.connector_reports import ConnectorReports
from canary_obs.errors import KVCacheViolation


class Loads:
    """Takes what is reported, or raises."""

    def __init__(self, raised: Exception | None = None) -> None:
        self.raised, self.reports = raised, list[tuple[Any, ...]]()

    def reported(self, finished: Any, failed: Any, blocks: Any, observer: Any) -> None:
        self.reports.append((set(finished), set(failed), set(blocks)))
        if self.raised is not None:
            raise self.raised


def asked(loads: Loads, results: Any = None) -> tuple[set[int], list[str]]:
    """What the runner is told after a step, and the faults that were counted."""
    reports, faults = ConnectorReports(loads, [], list), list[str]()  # type: ignore[arg-type]
    reports._observer = SimpleNamespace(fault=lambda part, error: faults.append(f"{part}: {error}"))  # type: ignore[assignment]
    reports._around_results(lambda: results)()
    return reports._around_errors(lambda: {7})(), faults


@pytest.mark.parametrize("named", [True, False])
def test_what_arrived_and_what_failed_is_reported_with_the_blocks(named: bool) -> None:
    loads = Loads()
    results = SimpleNamespace(finished_recving={"a", "b"}, failed_recving={"b"}) if named else None
    assert asked(loads, results) == ({7}, [])
    assert loads.reports == [({"a", "b"} if named else set(), {"b"} if named else set(), {7})]


class OffloadingConnector:
    """By its name."""


class LMCacheConnectorV1:
    """By its name: it may store parts of blocks."""


class NixlConnector:
    """By its name: it sends to the engine that goes on."""


@pytest.mark.parametrize(
    ("connectors", "stored"),
    [
        ([NixlConnector], None),
        ([OffloadingConnector, NixlConnector], ("OffloadingConnector", True, False)),
        (
            [OffloadingConnector, LMCacheConnectorV1],
            ("LMCacheConnectorV1, OffloadingConnector", False, False),
        ),
        ([], None),
    ],
)
def test_where_blocks_may_be_stored(
    monkeypatch: pytest.MonkeyPatch, connectors: list[type], stored: tuple[str, bool, bool] | None
) -> None:
    multi = SimpleNamespace(sub_connectors=[one() for one in connectors]) if connectors else None
    monkeypatch.setattr("canary_obs.engines.vllm.connector_reports.worker_connector", lambda: multi)
    monkeypatch.setenv("KV_CANARY_COPY_RECORDS", "0")
    reports = ConnectorReports(Loads(), [], list)  # type: ignore[arg-type]
    patches = SimpleNamespace(wrap=lambda *args: None)
    hooks = SimpleNamespace(after_launch=[], after_checks=[])
    reports.attach(patches, SimpleNamespace(), hooks)  # type: ignore[arg-type]
    assert reports.stored_in == stored


def test_a_fault_is_counted_and_the_runner_gets_its_answer() -> None:
    assert asked(Loads(RuntimeError("made up"))) == ({7}, ["announce: made up"])


def test_a_load_that_is_found_damaged_in_mode_raise_stops_the_engine() -> None:
    with pytest.raises(KVCacheViolation):
        asked(Loads(KVCacheViolation.__new__(KVCacheViolation)))
