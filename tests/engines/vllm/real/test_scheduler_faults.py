"""Failures of the canary in the scheduler of a real vLLM: it answers as ever, and the state is not `ok`."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.engines.vllm import admissions, block_events, cache_count
from canary_obs.vocabulary import State
from tests.engines.vllm.real.rig import prompts


def fails(*_: Any) -> None:
    raise LookupError("planted")


# Where events, hits and counts of cached blocks are made.
FAULTS: dict[str, tuple[Any, str]] = {
    "events": (block_events, "_cached_runs"),
    "hits": (block_events, "note_hit"),
    "admissions": (admissions, "Admitted"),
    "count": (cache_count.MapCount, "take"),
    "settled": (cache_count.MapCount, "_settle"),  # as counts are sent
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
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            assert [rig.generate(asked) for _ in range(2)] == [wanted, wanted]
            assert rig.settle() == []
            state, reasons = rig.canary.verdict()
        assert state is not State.OK, name
        assert reasons, name
    for number in range(len(block_events._REPORTS)):
        left = [*block_events._REPORTS]
        left[number] = fails
        with monkeypatch.context() as patched:
            patched.setattr(block_events, "_REPORTS", tuple(left))
            assert rig.generate(asked) == wanted
    assert rig.found == []
    faults = [record.message for record in caplog.records if "failed in vLLM's scheduler" in record.message]
    assert len(faults) == len(FAULTS) + 1, faults
