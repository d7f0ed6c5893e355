"""A vLLM that answers a few requests for each line of its standard input; for tests of a server's life."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from canary_obs.demo.in_process_vllm import TINY_CONTEXT, InProcessVllm, tiny_vllm

SEED = 1


def main() -> None:
    """Print `ready` once the engine runs, and `answered` after each line."""
    with TemporaryDirectory() as folder:
        engine = _engine(Path(folder))
        print("ready", flush=True)
        for _ in sys.stdin:
            engine.add_requests(engine.random_prompts(4, 200), 20)
            engine.run()
            print("answered", flush=True)
        engine.shutdown()


def _engine(folder: Path) -> InProcessVllm:
    if not torch.cuda.is_available():
        return tiny_vllm(folder, 4, SEED)
    # Given, not profiled: vLLM refuses to profile while another engine, as one just killed, frees memory.
    return InProcessVllm(
        folder, "small", SEED, max_model_len=TINY_CONTEXT, gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip


if __name__ == "__main__":
    main()
