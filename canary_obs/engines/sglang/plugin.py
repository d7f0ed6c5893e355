"""The entry point of `sglang.srt.plugins`, which SGLang calls in each of its processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

SWITCHES = ("KV_CANARY_MODE", "KV_CANARY_CONFIG")
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SERVER = "_kv_canary_server"  # of a scheduler that was built through the hook: its server's name

log = logging.getLogger("canary_obs")
_registered = False


def register() -> None:
    """Register hooks on SGLang's scheduler; idempotent.

    Does nothing unless KV_CANARY_MODE or KV_CANARY_CONFIG is set. Raises ConfigurationError for a bad
    setting: SGLang logs that, and starts without protection.
    """
    global _registered
    if _registered or not any(os.environ.get(name) for name in SWITCHES):
        return
    from canary_obs.config import IN_PROCESS, CanaryConfig, load
    from canary_obs.transport.endpoint import parse_endpoint
    from canary_obs.transport.keys import engine_keys
    from canary_obs.vocabulary import Mode

    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    keyed = engine_keys(config) is not None
    if config.endpoint != IN_PROCESS:
        parse_endpoint(config.endpoint, keyed=keyed)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    _registered = True


def attach_after_init(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.__init__`: pools, graphs and prefix cache are final when it has returned."""
    result = original(scheduler, *args, **kwargs)
    ports = kwargs.get("port_args", args[1] if len(args) > 1 else None)
    vars(scheduler)[_SERVER] = str(getattr(ports, "tokenizer_ipc_name", "")) or f"pid {os.getpid()}"
    _attach(scheduler)
    return result


def splice_records(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.init_disaggregation`, which registers the buffers that are sent between servers."""
    with ExitStack() as stack:
        _guarded(_splice, scheduler, stack)
        return original(scheduler, *args, **kwargs)


def report_before_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.run_event_loop`: a scheduler that the hook on `__init__` missed reports that."""
    if _SERVER not in vars(scheduler):
        _attach(scheduler, "SGLang did not run the hook on Scheduler.__init__; its log names the reason")
    return original(scheduler, *args, **kwargs)


def detach_before_release(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `release_memory_occupation`, which unmaps the KV: nothing may read it."""
    if _concerns_kv(args, kwargs) and (scheduler := getattr(updater, "scheduler", None)) is not None:
        _guarded(_detach, scheduler)
    return original(updater, *args, **kwargs)


def attach_after_resume(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `resume_memory_occupation`: the KV is mapped again, and empty."""
    concerned = _concerns_kv(args, kwargs)  # before the call, which may change its argument
    result = original(updater, *args, **kwargs)
    if concerned and (scheduler := getattr(updater, "scheduler", None)) is not None:
        _attach(scheduler)
    return result


HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SCHEDULER}.__init__": attach_after_init,
    f"{_SCHEDULER}.init_disaggregation": splice_records,
    f"{_SCHEDULER}.run_event_loop": report_before_loop,
    f"{_UPDATER}.release_memory_occupation": detach_before_release,
    f"{_UPDATER}.resume_memory_occupation": attach_after_resume,
}


def _attach(scheduler: Any, unsupported: str | None = None) -> None:
    def attach() -> None:
        from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler

        server = vars(scheduler).get(_SERVER, f"pid {os.getpid()}")
        attach_to_scheduler(scheduler, server, unsupported or _missing_hooks())

    _guarded(attach)


def _splice(scheduler: Any, stack: ExitStack) -> None:
    from canary_obs.config import CanaryConfig, load
    from canary_obs.engines.sglang.settings import settings_of
    from canary_obs.engines.sglang.spliced_buffers import spliced_buffers
    from canary_obs.engines.sglang.untried import ROLES

    if load(CanaryConfig).transfer_records and settings_of(scheduler).disaggregation_mode in ROLES:
        stack.enter_context(spliced_buffers(scheduler))


def _detach(scheduler: Any) -> None:
    from canary_obs.engines.sglang.scheduler_canary import detach_from_scheduler

    detach_from_scheduler(scheduler)


def _guarded(run: Callable[..., None], *arguments: Any) -> None:
    """An exception out of a hook would end the engine: it leaves only in mode `raise`."""
    from canary_obs.config import CanaryConfig, load
    from canary_obs.vocabulary import Mode

    try:
        run(*arguments)
    except Exception:
        if load(CanaryConfig).mode is Mode.RAISE:
            raise
        log.exception("canary_obs: this engine is not protected")


def _missing_hooks() -> str | None:
    """Which of the hooks SGLang failed to apply; it only logs that."""
    import pkgutil

    missing = []
    for target, hook in HOOKS.items():
        owner, _, name = target.rpartition(".")
        try:
            method: Any = getattr(pkgutil.resolve_name(owner), name, None)
        except (ImportError, AttributeError):
            method = None
        while method is not None and hook not in _closed_over(method):
            method = getattr(method, "__wrapped__", None)
        if method is None:
            missing.append(target)
    if not missing:
        return None
    return f"SGLang did not apply the hooks on {', '.join(missing)}; its log names the reason"


def _closed_over(method: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]


def _concerns_kv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    request = kwargs.get("recv_req", args[0] if args else None)
    tags = getattr(request, "tags", None)
    return not tags or "kv_cache" in tags
