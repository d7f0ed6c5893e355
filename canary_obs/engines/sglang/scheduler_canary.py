"""Attaches a canary to an SGLang scheduler, or reports why not."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from canary_obs.config import CanaryConfig, load
from canary_obs.engines.sglang.adapter import SglangAdapter
from canary_obs.engines.sglang.ranks import ranks_of
from canary_obs.engines.sglang.versions import installed_version
from canary_obs.engines.toolkit.attachment import attach_adapter
from canary_obs.engines.toolkit.server_number import separate
from canary_obs.engines.toolkit.service_process import SupervisedService, start_service
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.refusal import Refusal
from canary_obs.vocabulary import Mode

log = logging.getLogger("canary_obs")
_ATTRIBUTE = "kv_canary"  # of the scheduler: its SchedulerCanary


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCanary:
    """What a scheduler was given: a canary, or a refusal that reports why not."""

    runtime: CanaryRuntime | None
    adapter: SglangAdapter | None
    refusal: Refusal | None
    service: SupervisedService | None


def attach_to_scheduler(scheduler: Any, server: str, unsupported: str | None = None) -> None:
    """Attach to a scheduler that is built, and has no requests.

    `server`: a name that all processes of its server share. `unsupported`: a reason not to attach, which is
    reported instead. A scheduler that cannot be protected keeps running; the reason is logged and reported.
    """
    detach_from_scheduler(scheduler)
    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    rank, expected = ranks_of(scheduler, local=config.endpoint.startswith("ipc://"))
    config = msgspec.structs.replace(config, rank=rank, expected_ranks=config.expected_ranks or expected)
    config, port = separate(config, server)
    service = start_service(config, port)
    runtime: CanaryRuntime | None = None
    adapter: SglangAdapter | None = None
    refusal: Refusal | None = None
    try:
        if unsupported is not None:
            raise UnsupportedEngine(unsupported)
        # The loops run in inference mode; tensors created there could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            adapter = SglangAdapter(scheduler)
            runtime = attach_adapter(adapter, config)
            runtime.mark_ready()
    except Exception as error:
        if config.mode is Mode.RAISE and not isinstance(error, UnsupportedEngine):
            raise
        if not isinstance(error, UnsupportedEngine):
            log.exception("canary_obs: could not be attached")
        refusal = Refusal(str(error) or type(error).__name__, config, ("sglang", installed_version()))
    vars(scheduler)[_ATTRIBUTE] = SchedulerCanary(
        runtime=runtime, adapter=adapter, refusal=refusal, service=service
    )


def detach_from_scheduler(scheduler: Any) -> None:
    """Detach a scheduler's canary, or end its refusal; stop the service it started. Idempotent."""
    given = vars(scheduler).pop(_ATTRIBUTE, None)
    if given is None:
        return
    if given.runtime is not None:
        given.runtime.detach()
    if given.refusal is not None:
        given.refusal.close()
    if given.service is not None:
        given.service.stop()


def canary_of(scheduler: Any) -> SchedulerCanary | None:
    """What `attach_to_scheduler` gave a scheduler; None = nothing."""
    given: SchedulerCanary | None = vars(scheduler).get(_ATTRIBUTE)
    return given
