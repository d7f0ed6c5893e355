"""Requests that vLLM admits with tokens that need not be computed: found in the cache, or loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from canary_obs.engines.vllm.scheduler_reports import log_fault

ADMITTED = "_kv_canary_admitted"  # of KVCacheCoordinator: since the last `schedule`; absent without any
_MOST = 1 << 16  # bounds the memory of a coordinator whose scheduler is not instrumented


class Admitted(NamedTuple):
    """Tokens that a request begins with."""

    request: str
    hit: int  # found in the prefix cache
    start: int  # of those that a connector loads
    stop: int


def around_new_computed_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method that gives such a request its blocks. Requests that run do not pass it."""

    def allocate_new_computed_blocks(
        coordinator: Any, request_id: str, new_computed_blocks: Any, num_local_computed_tokens: int,
        num_external_computed_tokens: int, *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        result = original(
            coordinator, request_id, new_computed_blocks, num_local_computed_tokens,
            num_external_computed_tokens, *rest, **kwargs,
        )  # fmt: skip
        try:
            # vLLM calls it without blocks, too, when a load has ended whose tokens then count as local.
            hit = num_local_computed_tokens if any(new_computed_blocks) else 0
            if hit or num_external_computed_tokens:
                stop = num_local_computed_tokens + num_external_computed_tokens
                _note(coordinator, Admitted(request_id, hit, num_local_computed_tokens, stop))
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
            log_fault(coordinator, "allocate_new_computed_blocks", error)
            with suppress(TypeError):  # without a __dict__ nothing can be sent, which workers notice
                vars(coordinator)[ADMITTED] = None
        return result

    return allocate_new_computed_blocks


def _note(coordinator: Any, admitted: Admitted) -> None:
    noted: list[Admitted] | None = vars(coordinator).setdefault(ADMITTED, [])
    if noted is not None:
        noted.append(admitted)
        if len(noted) > _MOST:
            vars(coordinator)[ADMITTED] = None


def take_admitted(coordinator: Any) -> list[Admitted]:
    """Those since the last call. Raises LookupError if some of them could not be noted."""
    admitted: list[Admitted] | None = vars(coordinator).pop(ADMITTED, [])
    if admitted is None:
        raise LookupError("requests were admitted that could not be noted")
    return admitted
