"""Entry point of the engine process."""

from __future__ import annotations

from typing import Any

from canary_obs.config import CanaryConfig, load
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engines.registry import adapter_for
from canary_obs.engines.toolkit.attachment import attach_adapter
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.transport.links import EngineLink
from canary_obs.vocabulary import Mode


def install_canary(
    engine: Any, config: CanaryConfig | None = None, *, link: EngineLink | None = None
) -> CanaryRuntime | None:
    """Attach a canary to an engine that is not running a step. Call `mark_ready()` once it is warmed up.

    `engine`: a vLLM `LLM` or model runner, an SGLang `Scheduler`, a reference `Engine`, or an EngineAdapter.
    Without `config`, settings come from KV_CANARY_* variables. Without `link`, snapshots go to
    `config.endpoint` (`inproc` = nowhere). Returns None in mode `none`. `detach()` on the result restores the
    engine exactly.
    Raises ConfigurationError or UnsupportedEngine, and then leaves the engine as it was.
    """
    config = load(CanaryConfig) if config is None else config
    if config.mode is Mode.NONE:
        return None
    adapter = engine if isinstance(engine, EngineAdapter) else adapter_for(engine)
    return attach_adapter(adapter, config, link)
