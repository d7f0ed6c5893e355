"""Run as a program: an `LLM(...)` whose engine and workers are processes of their own.

usage: answers.py MODEL_DIR RESULT.json ENGINE_JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm.real.rig import DEFAULTS, fork_processes, prompts, start_quickly


def give_room_to_later_stages(worker: Any) -> None:
    """vLLM 0.32 allocates what a pipeline stage receives in its warm-up, which CPU workers leave out."""
    runner = worker.model_runner
    if worker.vllm_config.parallel_config.pipeline_parallel_size > 1 and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


QUIET_SECONDS = 2.0  # time for idle sweeps and the patrol


def main(model: str, result: Path, engine: dict[str, Any]) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    start_quickly()
    fork_processes()
    llm = LLM(model=model, **(DEFAULTS | engine))
    llm.collective_rpc(give_room_to_later_stages)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts(12)]
    answers = [
        [list(output.outputs[0].token_ids) for output in llm.generate(asked, sampling, use_tqdm=False)]
        for asked in (inputs, inputs[::-1])
    ]
    time.sleep(QUIET_SECONDS)
    result.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
