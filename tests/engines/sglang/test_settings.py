"""Settings as SGLang runs with them, not as they were given."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.limits import check_scheduler
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_limits import CPU, drafting

_VIEW = "sglang.srt.arg_groups.overrides"


def test_what_an_sglang_that_changes_its_arguments_was_given() -> None:
    """Without SGLang's own view of them, as in 0.5.16; with it, nothing was decided here."""
    scheduler = SimpleNamespace(server_args=SimpleNamespace(tp_size=2, dcp_size=1))
    assert (settings_of(scheduler).tp_size, settings_of(scheduler).dcp_size) == (2, 1)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What SGLang decides, as its own view has it; the real one is asked in real/test_settings.py."""
    found: dict[str, Any] = {}
    parts = _VIEW.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[_VIEW])["resolving_view"] = lambda given: SimpleNamespace(**(vars(given) | found))
    return found


def test_what_sglang_decides_is_refused_as_what_it_is_given(decided: dict[str, Any]) -> None:
    """It turns --enable-dp-attention into attn_dp_size, for one."""
    check_scheduler(drafting(), CPU)
    for name, value in (("attn_dp_size", 2), ("enable_hisparse", True)):
        decided.clear()
        decided[name] = value
        with pytest.raises(UnsupportedEngine, match=f"{name}={value} is not covered yet"):
            check_scheduler(drafting(), CPU)


def test_what_sglang_decides_otherwise_is_not_refused(decided: dict[str, Any]) -> None:
    """On a CPU it does without the overlap loop where it drafts; NEXTN is its EAGLE."""
    found = drafting(disable_overlap_schedule=False)
    found.server_args.speculative_algorithm = "NEXTN"
    with pytest.raises(UnsupportedEngine, match="speculative_algorithm='NEXTN' is not covered yet"):
        check_scheduler(found, CPU)
    decided.update(speculative_algorithm="EAGLE", disable_overlap_schedule=True)
    check_scheduler(found, CPU)
