"""The entry point of `vllm.general_plugins`, which vLLM calls in each of its processes."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from canary_obs.config import CanaryConfig
    from canary_obs.engines.toolkit.method_patches import MethodPatches

SWITCHES = ("KV_CANARY_MODE", "KV_CANARY_CONFIG")
_patches: MethodPatches | None = None


def register() -> None:
    """Instrument the schedulers and workers of this process; idempotent.

    Does nothing unless KV_CANARY_MODE or KV_CANARY_CONFIG is set. An unsupported vLLM starts without
    protection, which is logged and reported to the service. Raises ConfigurationError for a bad setting.
    """
    global _patches
    if _patches is not None or not any(os.environ.get(name) for name in SWITCHES):
        return
    from canary_obs.config import IN_PROCESS, CanaryConfig, load
    from canary_obs.transport.endpoint import parse_endpoint
    from canary_obs.transport.keys import engine_keys
    from canary_obs.vocabulary import Mode

    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    # A bad endpoint or key is refused now, not when the engine has loaded its weights.
    keyed = engine_keys(config) is not None
    if config.endpoint != IN_PROCESS:
        parse_endpoint(config.endpoint, keyed=keyed)
    from canary_obs.engines.toolkit.method_patches import MethodPatches

    _enable_logging()
    _patches = MethodPatches()
    _instrument(_patches, config)


def is_registered() -> bool:
    """Whether `register` has instrumented this process."""
    return _patches is not None


def unregister() -> None:
    """Restore vLLM's classes; canaries that are attached to workers stay attached."""
    global _patches
    if _patches is not None:
        _patches.restore()
        _patches = None


def _instrument(patches: MethodPatches, config: CanaryConfig) -> None:
    import vllm

    from canary_obs.engines.toolkit.engine_methods import find_class
    from canary_obs.engines.vllm.block_events import instrument_scheduler_classes
    from canary_obs.engines.vllm.versions import WORKER, check_hooks, check_version
    from canary_obs.errors import UnsupportedEngine
    from canary_obs.runtime.refusal import log_unprotected
    from canary_obs.runtime.untried import check_untried

    unsupported: str | None = None
    try:
        check_untried(check_version(str(vllm.__version__)), config)
        check_hooks()
    except UnsupportedEngine as error:
        unsupported = str(error)
    else:
        instrument_scheduler_classes(patches)
    worker = find_class(WORKER, "initialize_from_config")
    if worker is None:
        log_unprotected(str(unsupported))
        return
    patches.wrap(worker, "initialize_from_config", _wrap_lifecycle_before(unsupported))


def _wrap_lifecycle_before(unsupported: str | None) -> Callable[..., Any]:
    # Plugins of a worker process are loaded within `init_worker`, so this is the first method to wrap.
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_from_config(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            from canary_obs.engines.vllm.worker import wrap_lifecycle

            wrap_lifecycle(wrapper.worker, unsupported)
            return original(wrapper, *args, **kwargs)

        return initialize_from_config

    return make


def _enable_logging() -> None:
    """Show the canary's log when nothing is configured: vLLM configures its own logger only."""
    log = logging.getLogger("canary_obs")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [canary_obs] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
