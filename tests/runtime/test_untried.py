"""An engine's version that nobody has tested: degraded, or refused where the settings say so."""

from __future__ import annotations

import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.vocabulary import State

UNTRIED = "engine 9.9 is newer than the versions that were tested"


def adapter() -> ReferenceAdapter:
    found = ReferenceAdapter(Engine(settings.tiny(seed=1)))
    found.untried = UNTRIED
    return found


def test_the_state_is_degraded_for_as_long_as_it_is_attached() -> None:
    canary = install_canary(adapter(), CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    canary.mark_ready()
    assert canary.verdict() == (State.DEGRADED, (UNTRIED,))
    canary.detach()


def test_the_settings_may_refuse_it() -> None:
    given = adapter()
    config = CanaryConfig(endpoint=IN_PROCESS, untried_engine="refuse")
    with pytest.raises(UnsupportedEngine, match=f"{UNTRIED}; KV_CANARY_UNTRIED_ENGINE=refuse"):
        install_canary(given, config)
    given.untried = None
    canary = install_canary(given, config)
    assert canary is not None
    canary.detach()
