"""What the scheduler's side attaches to its outputs, and what becomes of its own failures; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm import block_events, output_reports, pending_events
from canary_obs.engines.vllm.pool_events import EventsLost
from canary_obs.engines.vllm.scheduler_reports import SECONDS_ATTRIBUTE, SchedulerSeconds, log_fault


def fails(*_: Any) -> None:
    raise LookupError("planted")


def names(scheduler: Any, output: Any) -> None:
    output.name = scheduler.name


def test_a_report_that_fails_keeps_no_other_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(output_reports, "due_reports", lambda *_: [fails, names])
    scheduler = SimpleNamespace(name="a")
    for _ in range(3):
        output = SimpleNamespace()
        output_reports.attach_reports(scheduler, output)
        assert output.name == "a"
    assert [record.message.partition(" in ")[0] for record in caplog.records] == ["canary_obs: fails failed"]


def test_nothing_leaves_where_even_the_fault_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Slotted:
        __slots__ = (SECONDS_ATTRIBUTE,)

    with pytest.raises(TypeError):
        vars(Slotted())
    log_fault(Slotted(), "counting", LookupError("planted"))
    assert "counting failed" in caplog.text


def test_the_time_of_reports_reaches_the_worker_since_it_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_reports, "due_reports", lambda *_: [lambda *_: sum(range(1000))])
    scheduler, overhead, seconds = SimpleNamespace(), dict[str, float](), SchedulerSeconds()
    spent = []
    for _ in range(3):
        output = SimpleNamespace()
        output_reports.attach_reports(scheduler, output)
        seconds.note(output, overhead)
        spent.append(getattr(output, SECONDS_ATTRIBUTE))
        assert overhead["scheduler"] == spent[-1] - spent[0]
    assert spent == sorted(set(spent))
    assert spent[0] > 0
    other = dict[str, float]()
    SchedulerSeconds().note(SimpleNamespace(), other)
    assert other == {}, "unknown is absent, not 0"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cache_full_blocks", (None, [SimpleNamespace()], 0, 1, 16, 0)),
        ("cache_partial_block", (None, SimpleNamespace(), 5, 0, 16)),
        ("move_block_hashes", (SimpleNamespace(), SimpleNamespace())),
        ("_remove_cached_block_hashes", (SimpleNamespace(),)),
        ("reset_prefix_cache", ()),
    ],
)
def test_events_that_cannot_be_recorded_are_lost_and_said(
    name: str, arguments: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has what it called for, and the workers learn that they no longer know the cache."""
    pool = SimpleNamespace()
    for _ in range(2):
        wrapped = block_events._POOL_WRAPPERS[name](lambda *_, **__: "done")
        assert wrapped(pool, *arguments) == "done"
    assert EventsLost(1) in vars(pool)[pending_events.PENDING]
    assert [f"{name} failed in vLLM's scheduler" in record.message for record in caplog.records] == [True]
