"""A vLLM that prefills prompts for another engine, in a process of its own: a line of JSON in, one out.

In: {"prompt": token ids, "flip": whether to damage the KV once it was computed, "expire": whether what was
not fetched yet has waited for too long}. Out: `kv_transfer_params`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}  # fmt: skip


def settings(role: str, blocks: int, ranks: int = 1) -> dict[str, Any]:
    """Of an engine of this role; pools of different sizes, so that block numbers differ."""
    transfer = {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu",
        "engine_id": f"{role}-{ranks}", "kv_load_failure_policy": "recompute",
    }  # fmt: skip
    return {"kv_transfer_config": transfer, "num_gpu_blocks_override": blocks}


class Prefill:
    """The process, as its users see it."""

    def __init__(self, model: Path, port: int, tensor_parallel: int = 1) -> None:
        command = [sys.executable, "-m", __name__, str(model), str(tensor_parallel)]
        more = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "KV_CANARY_ENDPOINT": "inproc"}
        if tensor_parallel > 1:
            more["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("0" for _ in range(tensor_parallel))
        environment = os.environ | ENVIRONMENT | more
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]

    def ask(self, prompt: list[int], **how: Any) -> dict[str, Any]:
        """Prefill a prompt; what the decode engine needs."""
        self._process.stdin.write(json.dumps({"prompt": prompt, **how}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the prefill engine ended with {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()


def main() -> None:
    """Serve standard input."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from tests.engines.vllm.real.interpreted import stand_in_driver

        stand_in_driver()
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from tests.engines.vllm.real.rig import DEFAULTS

    model, tensor_parallel = sys.argv[1], int(sys.argv[2])
    how = DEFAULTS | settings("kv_producer", 90, tensor_parallel) | {"tensor_parallel_size": tensor_parallel}
    llm = LLM(model=model, **how)
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
              "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("expire"):
            waiting = get_kv_transfer_group().connector_worker._reqs_to_send
            waiting.update(dict.fromkeys(waiting, 0.0))
        sampling = SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": wanted}
        )
        (output,) = llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
        params = output.kv_transfer_params
        if asked.get("flip"):
            core = llm.llm_engine.engine_core.engine_core
            runner = core.model_executor.driver_worker.worker.model_runner
            runner.kv_caches[-1][params["remote_block_ids"][0][1]].view(-1)[7] += 1
        print(json.dumps(params), flush=True)
    with suppress(Exception):
        llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # what it holds is the system's to free, at once


if __name__ == "__main__":
    main()
