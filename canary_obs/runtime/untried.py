"""Says that nobody has tested this canary with the engine's version."""

from __future__ import annotations

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.vocabulary import State


class UntriedEngine:
    """A ReasonSource."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter

    def reasons(self) -> list[tuple[State, str]]:
        """Degraded for as long as the canary is attached: it agrees with itself, but nobody looked on."""
        untried = self._adapter.untried
        return [] if untried is None else [(State.DEGRADED, untried)]


def check_untried(untried: str | None, config: CanaryConfig) -> None:
    """Raises UnsupportedEngine for an untried version (see EngineAdapter.untried) if the settings say so."""
    if untried is not None and config.untried_engine == "refuse":
        raise UnsupportedEngine(
            f"{untried}; KV_CANARY_UNTRIED_ENGINE=refuse: use a tested version, a newer canary_obs, or "
            "KV_CANARY_UNTRIED_ENGINE=attach, with which it is rehearsed and called degraded"
        )
