"""The door of the engine process: puts a canary into an engine."""

from __future__ import annotations

import logging
from typing import Any

import torch

from canary_obs.config import IN_PROCESS, CanaryConfig, load
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engines.registry import adapter_for
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.transport.links import EngineLink
from canary_obs.transport.sender import open_link
from canary_obs.vocabulary import Mode

log = logging.getLogger("canary_obs")


def install_canary(
    runner: Any, config: CanaryConfig | None = None, *, link: EngineLink | None = None
) -> CanaryRuntime | None:
    """Attach to an engine (or take an EngineAdapter); None in mode `none`. Call `mark_ready()` after warm-up.

    Without `config` settings come from KV_CANARY_* variables; without `link` snapshots go to
    `config.endpoint` (`inproc` = nowhere). Raises ConfigurationError or UnsupportedEngine before the
    engine is touched.
    """
    config = load(CanaryConfig) if config is None else config
    if config.mode is Mode.NONE:
        return None
    adapter = runner if isinstance(runner, EngineAdapter) else adapter_for(runner)
    if not adapter.groups:
        raise UnsupportedEngine(
            f"{adapter.name} {adapter.version} shows no KV groups; nothing could be protected"
        )
    if link is None and config.endpoint != IN_PROCESS:
        link = open_link(config)
    try:
        device = device_of(adapter)
        check_current_device(device)
        runtime = CanaryRuntime(adapter, config, device, link)
        adapter.attach(runtime)
    except Exception:
        adapter.detach()
        if link is not None:
            link.close(0.0)
        raise
    log.info(memory_report(runtime))
    return runtime


def device_of(adapter: EngineAdapter) -> torch.device:
    """Where the engine's KV lies. Raises UnsupportedEngine when groups lie on different devices."""
    devices = {source.tensor.device for group in adapter.groups for source in group.sources}
    if len(devices) != 1:
        named = sorted(map(str, devices)) or "none"
        raise UnsupportedEngine(f"KV tensors lie on devices {named}; one rank protects exactly one device")
    return devices.pop()


def check_current_device(device: torch.device) -> None:
    """Raises UnsupportedEngine when this thread launches kernels on another GPU than the one with the KV."""
    if device.type == "cuda" and (current := torch.cuda.current_device()) != device.index:
        raise UnsupportedEngine(
            f"the KV lies on {device}, and this thread's current device is cuda:{current}, where kernels are "
            f"launched; call torch.cuda.set_device({device.index}) in the thread that runs the engine, and "
            "attach from there"
        )


def memory_report(runtime: CanaryRuntime) -> str:
    """What the canary holds on the device, in bytes."""
    state = runtime.state
    slots = sum(group.view.num_slots for group in state.groups)
    return (
        f"canary attached: {slots} slots, records {state.record_bytes} B (32 B per slot), "
        f"fixed buffers {state.fixed_bytes + runtime.evidence.fixed_bytes} B, "
        f"write history {runtime.history.held_bytes} B, backend {state.backend.value}, "
        f"coverage {state.coverage:.1%} of KV bytes"
    )
