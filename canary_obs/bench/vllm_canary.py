"""The canary in an in-process vLLM: attached for a while, and checked for waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from canary_obs.demo.in_process_vllm import InProcessVllm
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm import plugin
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.worker import attach_to_worker, attached_adapter, detach_from_worker, runtime_of
from canary_obs.runtime.canary import CanaryRuntime

Hooks = tuple[tuple[object, tuple[str, ...]], ...]  # objects and names of their methods


@contextmanager
def attached(vllm: InProcessVllm) -> Iterator[tuple[CanaryRuntime, VllmAdapter]]:
    """Within it the worker has a canary, at an empty prefix cache; KV_CANARY_MODE must not be none.

    Raises UnsupportedEngine when the worker cannot be protected.
    """
    plugin.register()
    vllm.core.reset_prefix_cache()
    attach_to_worker(vllm.worker)
    try:
        adapter, canary = attached_adapter(vllm.worker), runtime_of(vllm.worker)
        assert canary is not None, "an attached adapter has a canary"
        yield canary, adapter
    finally:
        detach(vllm)


def detach(vllm: InProcessVllm) -> None:
    """Detach the canary that vLLM's own start or `attached` put there; idempotent."""
    detach_from_worker(vllm.worker)
    plugin.unregister()


def find_device_waits(
    vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter, also: Hooks = ()
) -> dict[str, Any]:
    """Run requests from arrival to end while each wait for the device within our hooks is an error.

    Returns `waits`: caught errors by observer part. `also` names further methods to check.
    """
    if not torch.cuda.is_available():
        return {"checked": False}
    hooks: Hooks = (
        (canary, ("before_write", "forward_launched", "after_forward", "after_step")),
        (adapter, ("_view", "complete_view", "follow_output")),
        *also,
    )
    patches = MethodPatches()
    for owner, names in hooks:
        for name in names:
            patches.wrap(owner, name, _forbid_device_waits)
    before = dict(canary.health.faults)
    try:
        prompts = vllm.random_prompts(8, 300)
        for _ in range(2):  # the second time they are prefix hits
            vllm.add_requests(prompts, 20)
            vllm.run()
    finally:
        patches.restore()
    caught = {part: count - before.get(part, 0) for part, count in canary.health.faults.items()}
    return {"checked": True, "waits": {part: count for part, count in caught.items() if count}}


def _forbid_device_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*given: Any, **named: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*given, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked
