"""Forwards that were checked, against those whose tables were compared with attention's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.views import ComparedTables
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.health import Health
from canary_obs.runtime.table_account import TableAccount
from canary_obs.vocabulary import State

TEXT = "the slots that attention was given were not compared: group {}, {} forwards"


class Account:
    """Two groups; a draft's tables are not compared."""

    def __init__(self) -> None:
        self.checked = {"full": 5, "swa": 5, "draft": 5}
        self.compared = {"full": ComparedTables(3, None), "swa": ComparedTables(3, None)}
        forwards = cast("ForwardAccount", SimpleNamespace(checked=self.checked))
        self.account = TableAccount(Health(3, CanaryConfig()), forwards, lambda: self.compared)
        self.account.start()

    def forward(self, name: str, *, compared: bool = True, gap: str | None = None, checked: int = 1) -> None:
        self.checked[name] += checked
        before = self.compared[name]
        self.compared[name] = ComparedTables(before.forwards + compared, gap or before.gap)


@pytest.fixture
def made() -> Account:
    return Account()


def test_what_was_missing_before_the_start_does_not_count(made: Account) -> None:
    made.forward("full")
    made.forward("full", checked=0)  # under way
    assert made.account.reasons() == []


def test_forwards_that_are_not_compared_are_named(made: Account) -> None:
    for _ in range(2):
        made.forward("full", compared=False)
        made.forward("swa")
    assert made.account.reasons() == [(State.DEGRADED, TEXT.format("full", 2))]
    made.account.acknowledge()
    assert made.account.reasons() == []
    made.forward("full", compared=False)
    assert made.account.reasons() == [(State.DEGRADED, TEXT.format("full", 1))]


def test_a_cause_that_was_acknowledged_stays_so(made: Account) -> None:
    made.forward("swa", compared=False, gap="no table")
    assert made.account.reasons() == [(State.DEGRADED, TEXT.format("swa", 1) + " (no table)")]
    made.account.acknowledge()
    made.forward("swa", compared=False, gap="no table")
    assert made.account.reasons() == []
    made.forward("swa", compared=False, gap="several")
    assert made.account.reasons() == [(State.DEGRADED, TEXT.format("swa", 2) + " (several)")]


def test_an_adapter_with_nothing_apart() -> None:
    forwards = cast("ForwardAccount", SimpleNamespace(checked={"full": 9}))
    account = TableAccount(Health(1, CanaryConfig()), forwards, lambda: None)
    account.start()
    assert account.reasons() == []
