"""Builds the canary for an adapter and attaches it: what every way into an engine ends in."""

from __future__ import annotations

import logging
import time

import torch

from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.replays import KEPT
from canary_obs.runtime.device.warm_up import expected_compilation
from canary_obs.runtime.untried import UntriedEngine, check_untried
from canary_obs.transport.links import EngineLink
from canary_obs.transport.sender import open_link

log = logging.getLogger("canary_obs")


def attach_adapter(
    adapter: EngineAdapter, config: CanaryConfig, link: EngineLink | None = None
) -> CanaryRuntime:
    """Attach a canary through an adapter. Checks begin with `mark_ready()`.

    Without `link`, one to `config.endpoint` is opened (`inproc` = none). Raises ConfigurationError or
    UnsupportedEngine, and then leaves the engine as it was.
    """
    if not adapter.groups:
        raise UnsupportedEngine(
            f"{adapter.name} {adapter.version} shows no KV groups; nothing could be protected"
        )
    check_untried(adapter.untried, config)
    if link is None and config.endpoint != IN_PROCESS:
        link = open_link(config)
    try:
        device = device_of(adapter)
        check_current_device(device)
        with expected_compilation():
            runtime = CanaryRuntime(adapter, config, device, link)
            runtime.health.add_source(UntriedEngine(adapter))
            adapter.attach(runtime)  # which compiles what its views need
    except Exception:
        adapter.detach()
        if link is not None:
            link.close(0.0)
        raise
    log.info(memory_report(runtime))
    return runtime


def protect(adapter: EngineAdapter, config: CanaryConfig) -> CanaryRuntime:
    """Attach, and begin the checks at once: for an engine that is warmed up. Raises as `attach_adapter`."""
    runtime = attach_adapter(adapter, config)
    started = time.monotonic()
    runtime.mark_ready()
    log.info("canary ready: preparing its kernels took %.1f s", time.monotonic() - started)
    return runtime


def device_of(adapter: EngineAdapter) -> torch.device:
    """The device of the engine's KV. Raises UnsupportedEngine when groups are on different devices."""
    devices = {source.tensor.device for group in adapter.groups for source in group.sources}
    if len(devices) != 1:
        named = sorted(map(str, devices)) or "none"
        raise UnsupportedEngine(f"KV tensors are on devices {named}; one rank protects exactly one device")
    return devices.pop()


def check_current_device(device: torch.device) -> None:
    """Raises UnsupportedEngine when the calling thread's current CUDA device is another one."""
    if device.type == "cuda" and (current := torch.cuda.current_device()) != device.index:
        raise UnsupportedEngine(
            f"the KV is on {device}, but the current device of this thread is cuda:{current}, where kernels "
            f"are launched; call torch.cuda.set_device({device.index}) in the thread that runs the engine, "
            "and attach from there"
        )


def memory_report(runtime: CanaryRuntime) -> str:
    """One line: what the canary allocated on the device, in bytes."""
    state = runtime.state
    slots = sum(group.view.num_slots for group in state.groups)
    return (
        f"canary attached: {slots} slots, records {state.record_bytes} B (32 B per slot), "
        f"fixed buffers {state.fixed_bytes + runtime.evidence.fixed_bytes} B, "
        f"write history {runtime.history.held_bytes} B, backend {state.backend.value}, "
        f"coverage {state.coverage:.1%} of KV bytes"
        + (f", at most {KEPT} CUDA graphs" if state.clock.is_cuda else "")
    )
