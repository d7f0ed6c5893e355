"""What a newcomer touches to add a group (one file) or the name of a reason (two)."""

from __future__ import annotations

from pathlib import Path

import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.reference import adapter
from canary_obs.engines.reference.full_group import FullGroup
from canary_obs.engines.reference.groups import target_groups
from canary_obs.records import Snapshot
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import tiny, with_model
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.transport.wire import decode_message, encode
from canary_obs.vocabulary import PerturbMode
from tests.sizes import sized

ROOT = Path(__file__).parents[2]
REASON = "lost_write"


class TwinGroup(FullGroup):
    """A group nobody else has heard of: the same bytes with records of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, engine.runner, "twin")


@pytest.mark.parametrize("model", sized(["llama", "host_tier"], ["host_tier"]))
def test_a_group_is_one_file(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one: checks, sweeps, perturbation, snapshot and wire know the group by what it shows."""
    engine = Engine(with_model(tiny(seed=3), model))
    monkeypatch.setattr(adapter, "target_groups", lambda shown: (*target_groups(shown), TwinGroup(shown)))
    modes = ",".join(f"{mode.value}=0.1" for mode in PerturbMode)
    config = CanaryConfig(
        endpoint=IN_PROCESS, perturb=modes, perturb_enabled=True, perturb_group="twin", perturb_seed=7,
        # What the patrol meets in time depends on the machine's load, so the tail compares whole prefixes.
        prefix_data=True, patrol_budget="50%", sweep_interval=40,
    )  # fmt: skip
    canary = install_canary(engine, config)
    assert canary is not None
    canary.mark_ready()
    traffic = Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 3)
    while engine.statistics.steps < sized(200, 120):
        traffic.advance(engine)
        if engine.has_work():
            engine.step()
    canary.check_everything()
    final = decode_message(encode(canary.detach()))
    assert isinstance(final, Snapshot)
    assert sum(final.groups["twin"].verified.values()) > 0
    assert canary.injector is not None
    for tally in canary.injector.injections.counts().values():
        assert tally.detected > 0
        assert (tally.missed, tally.open) == (0, 0)


def test_a_reason_is_named_in_two_files_and_where_it_is_checked() -> None:
    naming = {
        path.relative_to(ROOT).as_posix()
        for folder in ("canary_obs", "kernels", "dashboards", "alerts")
        for path in (ROOT / folder).rglob("*.py")
        if REASON in path.read_text(encoding="utf-8").lower()
    }
    places = ("kernels/canary_kernels/fingerprint/", "kernels/canary_kernels/layer_write/")
    checked = {path for path in naming if path.startswith(places)}
    assert checked
    said = {"canary_obs/service/incident/sentence.py"}  # in words, on an incident's page
    assert naming - checked - said == {"kernels/canary_kernels/layout.py", "canary_obs/vocabulary.py"}
