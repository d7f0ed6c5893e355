"""A vLLM that prefills prompts for another engine, in a process of its own: a line of JSON in, one out.

In: {"prompt": token ids, "flip": whether to damage the KV once it was computed, "flip_state": or the state,
"expire": whether what was not fetched yet has waited for too long, "send": a fault of the sends to come,
"rank": of which rank, "transfer": its id, with Mooncake}. Out: `kv_transfer_params`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from tests.forked import Forked

NIXL, MOONCAKE, MULTI = "NixlConnector", "MooncakeConnector", "MultiConnector"
ACCELERATOR = "tests.engines.vllm.real.accelerator"
ENVIRONMENT = {
    "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # as transfers of states want it
}  # fmt: skip
_PORTS = {
    NIXL: "VLLM_NIXL_SIDE_CHANNEL_PORT", MOONCAKE: "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    MULTI: "VLLM_NIXL_SIDE_CHANNEL_PORT",
}  # fmt: skip


@contextmanager
def as_for_transfers(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's engines are started with ENVIRONMENT."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    # vLLM looks once in a process, where engines of other tests may have been, or are still to come.
    get_conv_state_layout.cache_clear()
    try:
        yield
    finally:
        get_conv_state_layout.cache_clear()


_NIXL_WAITS_US = 1000  # at most; an event ends it
_SPAWNED = Path(__file__).with_name("spawned")


def settings(role: str, blocks: int, ranks: int = 1, connector: str = NIXL) -> dict[str, Any]:
    """Of an engine of this role; pools of different sizes, so that block numbers differ.

    A MultiConnector is one of NIXL with an OffloadingConnector beside it.
    """
    transfer: dict[str, Any] = {
        "kv_connector": connector, "kv_role": role, "kv_buffer_device": "cpu",
        "engine_id": f"{role}-{ranks}", "kv_load_failure_policy": "recompute",
    }  # fmt: skip
    if connector == MOONCAKE:
        transfer |= {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
    if connector == MULTI:
        from tests.engines.vllm.real.host_offload import transfer_config

        own = {name: value for name, value in transfer.items() if name != "engine_id"}
        children = [transfer_config(), own | {"kv_connector": NIXL}]
        transfer |= {"kv_connector_extra_config": {"connectors": children}}
    return {"kv_transfer_config": transfer, "num_gpu_blocks_override": blocks}


def let_nixl_wait() -> None:
    """Let NIXL wait for events: its thread never pauses, and engines on one core starve each other."""
    from nixl import _api

    binding: Any = _api.nixlBind
    if hasattr(binding, "kv_canary_agent"):
        return
    binding.kv_canary_agent = made = binding.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = _NIXL_WAITS_US
        return made(name, config)

    binding.nixlAgent = agent


def spawned_on_v2() -> dict[str, str]:
    """The environment in which spawned ranks find the stand-in for Triton's driver, if V2 was chosen."""
    if not is_v2() or torch.cuda.is_available():
        return {}
    # Inductor asks Triton's driver for more.
    return {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": os.pathsep.join((str(_SPAWNED), *sys.path))}


def is_v2() -> bool:
    """Whether the V2 model runner was chosen."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def can_fork() -> bool:
    """Whether engines may be forks of a process that has imported vLLM; V2 needs its driver before that."""
    return not is_v2() and not torch.cuda.is_available()


class Prefill:
    """The process, as its users see it."""

    def __init__(
        self, model: Path, port: int, tensor_parallel: int = 1, connector: str = NIXL, **engine: Any
    ) -> None:
        given = str(model), str(tensor_parallel), connector, json.dumps(engine)
        more = {_PORTS[connector]: str(port), "KV_CANARY_ENDPOINT": "inproc"}
        if tensor_parallel > 1:
            # Ranks wait for each other in busy loops: on one core each of them takes the other's time.
            cores = os.cpu_count() or 1
            more["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tensor_parallel))
            more |= spawned_on_v2()
        environment = os.environ | ENVIRONMENT | more
        asks, self._asked = _pipe()
        self._answers, answers = _pipe()
        with asks, answers:
            self._process: subprocess.Popen[bytes] | Forked
            if can_fork():
                files = [answers, sys.__stderr__]
                self._process = Forked(__name__, *given, env=environment, files=files, stdin=asks)
            else:
                command = [sys.executable, "-m", __name__, *given]
                self._process = subprocess.Popen(command, env=environment, stdin=asks, stdout=answers)

    def ask(self, prompt: list[int], **how: Any) -> dict[str, Any]:
        """Prefill a prompt; what the decode engine needs."""
        self._asked.write(json.dumps({"prompt": prompt, **how}) + "\n")
        self._asked.flush()
        for line in self._answers:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the prefill engine ended with {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        self._asked.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._answers.close()


def _pipe() -> tuple[TextIO, TextIO]:
    read, write = os.pipe()
    return open(read), open(write, "w")


class _Engine:
    """The engine in this process."""

    def __init__(self, model: str, tensor_parallel: int, connector: str, given: dict[str, Any]) -> None:
        from vllm import LLM

        from tests.engines.vllm.real.rig import DEFAULTS, fork_processes, start_quickly

        start_quickly()
        fork_processes()
        own = settings("kv_producer", 90, tensor_parallel, connector)
        if connector == MOONCAKE:
            own["worker_extension_cls"] = f"{ACCELERATOR}.OfWorkers"
        else:
            let_nixl_wait()
        self.llm = LLM(model=model, **(DEFAULTS | given | own | {"tensor_parallel_size": tensor_parallel}))
        self.core = self.llm.llm_engine.engine_core.engine_core

    def prefill(self, prompt: list[int], wanted: dict[str, Any]) -> dict[str, Any] | None:
        """What goes to the decode engine."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": wanted | {"do_remote_decode": True, "do_remote_prefill": False}}
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        params: dict[str, Any] | None = output.kv_transfer_params
        return params

    def flip(self, block: int, rank: int = 0) -> None:
        """A value of one rank."""
        self.core.model_executor.collective_rpc(flip, args=(block, rank))

    def flip_state(self, block: int) -> None:
        """A value of one layer's state."""
        self.core.model_executor.collective_rpc(flip_state, args=(block,))


def flip(worker: Any, block: int, rank: int) -> None:
    """In a worker."""
    if worker.rank == rank:
        worker.model_runner.kv_caches[-1][block].view(-1)[7] += 1


def flip_state(worker: Any, block: int) -> None:
    """In a worker."""
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    _, recurrence = next(layer.kv_cache for layer in layers if not hasattr(layer.kv_cache, "data_ptr"))
    recurrence[block].view(-1)[7] += 1


def _by_nixl(engine: _Engine, asked: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if asked.get("expire"):
        waiting = get_kv_transfer_group().connector_worker._reqs_to_send  # not within a MultiConnector
        waiting.update(dict.fromkeys(waiting, 0.0))
    names = "remote_engine_id", "remote_block_ids", "remote_host", "remote_port"
    params = engine.prefill(asked["prompt"], dict.fromkeys(names))
    assert params is not None
    if asked.get("flip"):
        engine.flip(params["remote_block_ids"][0][1])
    if asked.get("flip_state"):
        engine.flip_state(params["remote_block_ids"][1][0])
    return params


def main() -> None:
    """Serve standard input."""
    if is_v2():
        from tests.engines.vllm.real.interpreted import stand_in_driver

        stand_in_driver()
    model, tensor_parallel, connector, given = sys.argv[1:]
    engine = _Engine(model, int(tensor_parallel), connector, json.loads(given))
    serve = partial(_by_nixl, engine)
    if connector == MOONCAKE:
        from tests.engines.vllm.real.mooncake_sends import MooncakeSends

        serve = MooncakeSends(engine).serve
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
    with suppress(Exception):
        engine.core.shutdown()
    os._exit(0)  # what it holds is the system's to free, at once


if __name__ == "__main__":
    main()
