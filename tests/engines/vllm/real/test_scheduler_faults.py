"""Failures of the canary in the scheduler of a real vLLM: it answers as ever, and the state is not `ok`."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.engines.vllm import admissions, block_events, cache_count, output_reports, pending_events
from canary_obs.vocabulary import State
from tests.engines.vllm.real.forwards import acknowledge
from tests.engines.vllm.real.rig import prompts


def fails(*_: Any) -> None:
    raise LookupError("planted")


# Where events, hits and counts of cached blocks are made.
FAULTS: dict[str, tuple[Any, str]] = {
    "events": (block_events, "_cached_runs"),
    "hits": (pending_events, "note_hit"),
    "admissions": (admissions, "Admitted"),
    "counts": (cache_count.MapCount, "_add"),  # as they are sent, at once or later
}


def test_vllm_goes_on_whatever_fails(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    asked = prompts(6)
    wanted = rig.generate(asked)
    rig.settle()
    assert rig.canary.verdict() == (State.OK, ())
    for owner, name in FAULTS.values():
        rig.fresh()
        assert rig.generate(asked) == wanted
        rig.settle()
        acknowledge(rig)
        rig.fresh()
        assert rig.canary.verdict() == (State.OK, ()), f"what was planted before {name} is still seen"
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            assert [rig.generate(asked) for _ in range(2)] == [wanted, wanted]
            assert rig.settle() == []
            state, reasons = rig.canary.verdict()
        assert state is not State.OK, name
        assert reasons, name
    for report in (*output_reports.REPORTS, output_reports.due_reports):
        with monkeypatch.context() as patched:
            patched.setattr(output_reports, report.__name__, fails)
            assert rig.generate(asked) == wanted
    assert rig.found == []
    faults = [record.message for record in caplog.records if "failed in vLLM's scheduler" in record.message]
    assert len(faults) == len(FAULTS) + 2, faults  # each report is called `fails`
