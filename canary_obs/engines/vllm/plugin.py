"""The entry point that vLLM calls in each of its processes; does nothing unless the canary is switched on."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from canary_obs.engines.toolkit.method_patches import MethodPatches

_SWITCHES = ("KV_CANARY_MODE", "KV_CANARY_CONFIG")
_patches: MethodPatches | None = None


def register() -> None:
    """`vllm.general_plugins`: watch the block pools and workers of this process; idempotent.

    Off unless KV_CANARY_MODE or KV_CANARY_CONFIG is set. Raises ConfigurationError for a bad setting.
    An unsupported vLLM is left alone and starts without protection, which is reported.
    """
    global _patches
    if _patches is not None or not any(os.environ.get(name) for name in _SWITCHES):
        return
    from canary_obs.config import IN_PROCESS, CanaryConfig, load
    from canary_obs.transport.endpoint import parse_endpoint
    from canary_obs.transport.keys import engine_keys
    from canary_obs.vocabulary import Mode

    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    # Now, and not when the engine has loaded its weights.
    keyed = engine_keys(config) is not None
    if config.endpoint != IN_PROCESS:
        parse_endpoint(config.endpoint, keyed=keyed)
    from canary_obs.engines.toolkit.method_patches import MethodPatches

    _speak_up()
    _patches = MethodPatches()
    _watch(_patches)


def unregister() -> None:
    """Take every class-level wrapper out again; workers attached meanwhile keep theirs."""
    global _patches
    if _patches is not None:
        _patches.restore()
        _patches = None


def _watch(patches: MethodPatches) -> None:
    import vllm

    from canary_obs.engines.toolkit.refusal import warn
    from canary_obs.engines.vllm.block_events import watch_pools
    from canary_obs.engines.vllm.versions import WORKER, check_seams, check_version, find_seam
    from canary_obs.errors import UnsupportedEngine

    unsupported: str | None = None
    try:
        check_version(str(vllm.__version__))
        check_seams()
    except UnsupportedEngine as error:
        unsupported = str(error)
    else:
        watch_pools(patches)
    worker = find_seam(WORKER, "initialize_from_config")
    if worker is None:
        warn(str(unsupported))
        return
    patches.wrap(worker, "initialize_from_config", _before_cache(unsupported))


def _before_cache(unsupported: str | None) -> Callable[..., Any]:
    # A worker's process loads its plugins inside `init_worker`: too late to wrap that one.
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_from_config(wrapper: Any, *given: Any, **named: Any) -> Any:
            from canary_obs.engines.vllm.worker import follow_life

            follow_life(wrapper.worker, unsupported)
            return original(wrapper, *given, **named)

        return initialize_from_config

    return make


def _speak_up() -> None:
    """vLLM configures its own logger only; what the canary has to say must be seen too."""
    log = logging.getLogger("canary_obs")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [canary_obs] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
