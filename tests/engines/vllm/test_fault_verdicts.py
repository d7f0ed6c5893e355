"""What `tests.gpu.vllm_faults` says of a fault: found, found otherwise, masked, missed, or an error."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import fault_verdicts, vllm_fault_cases, vllm_faults
from tests.gpu.fault_verdicts import Masked, planted

FOUND = SimpleNamespace(phase="tail", reason="kv_data", group="full")


class Quiet:
    """An engine of which nothing is asked but what was found."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.late: list[Any] = []  # on their way
        self.canary = SimpleNamespace(delivery=SimpleNamespace(drain=lambda _: self.found.extend(self.late)))

    def fresh(self) -> None:
        self.found.clear()


def finding(rig: Any, _: pytest.MonkeyPatch) -> None:
    rig.found.append(FOUND)


def finding_elsewhere(rig: Any, _: pytest.MonkeyPatch) -> None:
    rig.found.append(FOUND)
    raise AssertionError("another phase")


def missing(rig: Any, _: pytest.MonkeyPatch) -> None:
    raise AssertionError("nothing")


def changing_nothing(rig: Any, _: pytest.MonkeyPatch) -> None:
    raise Masked


def failing(rig: Any, _: pytest.MonkeyPatch) -> None:
    raise KeyError("no such block")


def finding_late(rig: Any, _: pytest.MonkeyPatch) -> None:
    rig.late.append(FOUND)
    raise AssertionError("nothing yet")


PLANTS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "found": finding, "otherwise": finding_elsewhere, "missed": missing, "masked": changing_nothing,
    "error": failing,
}  # fmt: skip


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(fault_verdicts, "acknowledge", lambda _: None)
    return {name: planted(Quiet(), plant) for name, plant in PLANTS.items()}  # type: ignore[arg-type]


def test_each_verdict(verdicts: dict[str, dict[str, Any]]) -> None:
    assert {name: seen["verdict"] for name, seen in verdicts.items()} == {name: name for name in PLANTS}
    assert verdicts["otherwise"]["reasons"] == [["tail", "kv_data", "full"]]
    assert "another phase" in verdicts["otherwise"]["why"]
    assert "no such block" in verdicts["error"]["why"]


@pytest.mark.parametrize("name", PLANTS)
def test_only_what_is_found_or_masked_is_a_success(verdicts: dict[str, Any], name: str) -> None:
    engines = {"llama": {"faults": {name: verdicts[name]}}}
    assert vllm_faults.succeeded(vllm_faults.summary(engines)) is (name in ("found", "masked"))


def test_what_is_on_its_way_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_verdicts, "acknowledge", lambda _: None)
    assert planted(Quiet(), finding_late)["verdict"] == "otherwise"  # type: ignore[arg-type]


def test_an_engine_that_did_not_end_is_no_success() -> None:
    assert not vllm_faults.succeeded(vllm_faults.summary({"llama": {"faults": {}, "error": "exit status 1"}}))


@pytest.mark.parametrize("when", ["violations_when_clean", "violations_after"])
def test_a_false_alarm_is_no_success(when: str) -> None:
    engine = {"violations_when_clean": [], "violations_after": []}
    assert vllm_faults.succeeded(vllm_faults.summary({"llama": {"faults": {}, "engine": engine}}))
    noisy = {"faults": {}, "engine": engine | {when: ["Violation(...)"]}}
    assert not vllm_faults.succeeded(vllm_faults.summary({"llama": noisy}))


def test_every_engine_has_its_faults() -> None:
    assert tuple(vllm_fault_cases.ENGINE_FAULTS) == vllm_faults.ENGINES
