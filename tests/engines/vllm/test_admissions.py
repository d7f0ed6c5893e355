"""Requests that begin with tokens they need not compute, without a vLLM; with one: real/test_accounts.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm import admissions
from canary_obs.engines.vllm.admissions import Admitted, around_new_computed_blocks, take_admitted


def call(coordinator: Any, request: str, blocks: tuple[list[int], ...], local: int, external: int) -> Any:
    """As vLLM's manager does, by keywords; what the method was given, and what it returned."""
    given: list[Any] = []

    def original(*positional: Any, **named: Any) -> str:
        given.append((positional, named))
        return "done"

    result = around_new_computed_blocks(original)(
        coordinator, request_id=request, new_computed_blocks=blocks, num_local_computed_tokens=local,
        num_external_computed_tokens=external, skip_zeroing_group_ids=(1,),
    )  # fmt: skip
    assert given == [((coordinator, request, blocks, local, external), {"skip_zeroing_group_ids": (1,)})]
    return result


def test_hits_and_loads_are_noted_until_they_are_taken() -> None:
    coordinator = SimpleNamespace()
    assert call(coordinator, "hit", ([5], []), 16, 0) == "done"
    call(coordinator, "load", ([], []), 0, 24)
    call(coordinator, "both", ([5], [6]), 16, 8)
    call(coordinator, "neither", ([], []), 0, 0)
    call(coordinator, "load", ([], []), 24, 0)  # it has ended: its tokens count as local now
    assert list(take_admitted(coordinator)) == [
        Admitted("hit", 16, 16, 16),
        Admitted("load", 0, 0, 24),
        Admitted("both", 16, 16, 24),
    ]
    assert list(take_admitted(coordinator)) == []
    assert vars(coordinator) == {}


def test_a_coordinator_whose_scheduler_never_asks_says_that_it_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admissions, "_MOST", 2)
    coordinator = SimpleNamespace()
    for number in range(4):
        call(coordinator, str(number), ([5],), 16, 0)
    with pytest.raises(LookupError):
        take_admitted(coordinator)
    call(coordinator, "next", ([5],), 16, 0)
    assert [admitted.request for admitted in take_admitted(coordinator)] == ["next"]


def test_what_cannot_be_noted_is_said_and_vllm_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = SimpleNamespace()
    call(coordinator, "before", ([5],), 16, 0)
    with monkeypatch.context() as patched:
        patched.setattr(admissions, "Admitted", None)
        assert call(coordinator, "hit", ([5],), 16, 0) == "done"
    call(coordinator, "after", ([5],), 16, 0)
    assert "allocate_new_computed_blocks failed in vLLM's scheduler" in caplog.text
    with pytest.raises(LookupError):
        take_admitted(coordinator)
    assert list(take_admitted(coordinator)) == []


def test_a_coordinator_that_can_keep_nothing_lets_vllm_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Slotted:
        __slots__ = ()

    assert call(Slotted(), "hit", ([5],), 16, 0) == "done"
    assert "allocate_new_computed_blocks failed in vLLM's scheduler" in caplog.text
