"""The table of faults on vLLM's KV connectors: each named test exists, no connector is left out."""

from __future__ import annotations

from tests.fault_cases.connectors import CONNECTORS, FAULTS, NIXL, Planted

_OF_SENDERS = "the sender gave up waiting and used the blocks again"


def test_every_fault_that_was_planted_has_its_test() -> None:
    missing = [
        (fault, connector, planted.test)
        for fault, by_connector in FAULTS.items()
        for connector, planted in by_connector.items()
        if not planted.exists
    ]
    assert missing == []
    renamed = Planted("`kv_data`", "test_nixl.py::test_that_is_not_there")
    assert not renamed.exists


def test_every_connector_is_said_something_of() -> None:
    for fault, by_connector in FAULTS.items():
        assert set(by_connector) == set(CONNECTORS) or fault == _OF_SENDERS
    assert NIXL in FAULTS[_OF_SENDERS]
