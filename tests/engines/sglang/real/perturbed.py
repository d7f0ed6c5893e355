"""All modes of fault injection at once, in one group of a real SGLang, that cannot exchange tokens there."""

from __future__ import annotations

import pytest

from canary_obs.runtime.perturb.injection import Injection
from canary_obs.vocabulary import PerturbMode
from tests.engines.perturbed import PERTURB, SETTINGS
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts


def inject_into(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the canaries to come."""
    modes = ",".join(f"{mode.value}=0.4" for mode in PerturbMode)
    # Each step reads the log of all groups: with many rows that takes most of its time.
    for name, value in (SETTINGS | {PERTURB: modes, "KV_CANARY_LANE_ROWS": "128"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KV_CANARY_IDLE_SWEEP_SECONDS", "0.01")
    monkeypatch.setenv(f"{PERTURB}_GROUP", group)


def check_injections(
    rig: Rig, group: str, why: str, *, longest: int = 290, no_entries: str | None = None
) -> None:
    """Every one is found or masked; each violation is explained by one. `why` no tokens are exchanged.

    `no_entries`: why no table entries are changed; None = they are.
    """
    injector = rig.canary.injector
    assert injector is not None
    injections, made = injector.injections, list[Injection]()
    add = injections.add

    def added(injection: Injection) -> None:
        made.append(injection)
        add(injection)

    injections.add = added  # type: ignore[method-assign]
    for seed in range(2):
        given = {f"{group}.{name}": (prompt * 9)[:longest] for name, prompt in prompts(4, seed).items()}
        rig.generate(given, 12)
    rig.settle()
    for mode, tally in injections.summary().items():
        assert (tally["missed"], tally["open"]) == (0, 0), (group, mode, tally, made)
        assert tally["detected"] + tally["masked"] == tally["injected"], (group, mode, tally)
        assert "" not in tally["masked_because"]
        left_out = {PerturbMode.NEXT_TOKEN_SWAP: why, PerturbMode.REQ_TO_TOKEN: no_entries}.get(mode)
        if left_out is not None:
            assert tally["injected"] == 0
            assert left_out in tally["skipped"]
        else:
            assert tally["detected"] > 0, (group, mode, tally)
    unexplained = [row for row in rig.found if not any(one.explains(row) for one in made)]
    assert unexplained == [], group
    assert rig.canary.health.faults == {}
