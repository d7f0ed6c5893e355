"""Protects a vLLM `LLM` whose engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.block_events import instrument_scheduler
from canary_obs.engines.vllm.model_runners import adapter_for_runner
from canary_obs.engines.vllm.plugin import SWITCHES, is_registered
from canary_obs.engines.vllm.versions import check_hooks
from canary_obs.engines.vllm.worker import canary_of
from canary_obs.errors import UnsupportedEngine


def adapter_for_llm(llm: Any) -> VllmAdapter:
    """The adapter of an `LLM`, not attached. Raises UnsupportedEngine when its worker is out of reach."""
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    engine = llm.llm_engine
    if not isinstance(engine.engine_core, InprocClient):
        raise UnsupportedEngine(_elsewhere("engine core"))
    core = engine.engine_core.engine_core
    if not isinstance(core.model_executor, UniProcExecutor):
        raise UnsupportedEngine(_elsewhere("workers"))
    worker = core.model_executor.driver_worker.worker
    if canary_of(worker) is not None:
        raise UnsupportedEngine(
            f"the vLLM plugin has attached a canary to this LLM already, as {' or '.join(SWITCHES)} is set; "
            "unset it to use install_canary"
        )
    if engine.has_unfinished_requests():
        raise UnsupportedEngine(
            "this LLM has unfinished requests, whose KV the canary has not seen; attach when there are none"
        )
    check_hooks()

    def wrap_engine(patches: MethodPatches) -> None:
        if not is_registered():  # else every scheduler of this process is instrumented through its class
            instrument_scheduler(patches, core.scheduler)
        patches.wrap(worker, "sleep", _refuse_sleep)

    return adapter_for_runner(worker.model_runner, worker=worker, wrap_engine=wrap_engine)


def _refuse_sleep(_: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(*_: Any, **__: Any) -> None:
        raise UnsupportedEngine(
            "the KV memory of a sleeping engine is unmapped, and the canary reads it; call detach() on the "
            "canary before sleep, and install_canary after wake_up"
        )

    return sleep


def _elsewhere(what: str) -> str:
    if any(os.environ.get(name) for name in SWITCHES):
        return (
            f"this LLM runs its {what} in other processes, where the vLLM plugin has attached a canary "
            f"already, as {' or '.join(SWITCHES)} is set; install_canary has nothing to do"
        )
    return (
        f"this LLM runs its {what} in other processes, out of reach of install_canary; set KV_CANARY_MODE "
        "before the LLM is created, so that the vLLM plugin attaches a canary in each worker, or set "
        "VLLM_ENABLE_V1_MULTIPROCESSING=0 and use a single worker"
    )
