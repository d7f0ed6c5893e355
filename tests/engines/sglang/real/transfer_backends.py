"""What SGLang's transfers between servers need on a CPU, and where a pair's two sides find each other."""

from __future__ import annotations

import gc
import socket
import time
from typing import Any

_SECONDS = 900.0


def install(role: str) -> None:
    """For the rest of this process; before a scheduler is built."""
    nixl_on_cpu()
    _mooncake_on_cpu()
    if role == "prefill":
        _start_bootstraps()


def end(scheduler: Any) -> None:
    """End the threads of NIXL's agent, which poll: those of earlier pairs would slow the next ones."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        if manager is not None:
            vars(manager).pop("agent", None)
    gc.collect()


def nixl_on_cpu() -> None:
    """SGLang registers KV as VRAM: on a CPU it is DRAM."""
    import nixl._api as api

    agents = [kind for kind in vars(api).values() if isinstance(kind, type)]
    (agent,) = (kind for kind in agents if hasattr(kind, "register_memory"))
    for name, method in list(vars(agent).items()):
        if callable(method) and not name.startswith("__"):
            setattr(agent, name, _in_dram(method))


def _in_dram(method: Any) -> Any:
    def called(self: Any, *given: Any, **named: Any) -> Any:
        given = tuple(_dram(value) for value in given)
        return method(self, *given, **{name: _dram(value) for name, value in named.items()})

    return called


def _dram(value: Any) -> Any:
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


def _mooncake_on_cpu() -> None:
    """Its sender hands page numbers over with an event of a CUDA stream."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def _start_bootstraps() -> None:
    """In a server the HTTP process starts it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_parallel

    kind: Any = Scheduler
    original = kind.init_disaggregation

    def init_disaggregation(self: Any) -> Any:
        from sglang.srt.managers.disagg_service import start_disagg_service

        if get_parallel().tp_rank == 0:
            self.bootstrap_service = start_disagg_service()
        port = self.server_args.disaggregation_bootstrap_port
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return original(self)
            except OSError:
                assert time.monotonic() < deadline, "SGLang's bootstrap server does not listen"

    kind.init_disaggregation = init_disaggregation
