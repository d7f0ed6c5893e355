"""An SGLang scheduler in this process, with its own event loop: generated weights, token ids as prompts."""

from __future__ import annotations

import array
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canary_obs.demo.in_process_vllm import LLAMA, SHAPES, TINY_CONTEXT, draw_weights
from canary_obs.engines.sglang.versions import check_device, check_version, installed_version

_FIRST_TOKEN = 3  # smaller ids are special tokens
_DEVICE = "cpu"
_SETTINGS: dict[str, Any] = {
    "device": _DEVICE, "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "grammar_backend": "none",
    "load_format": "dummy", "skip_tokenizer_init": True, "log_level": "warning", "mem_fraction_static": 0.2,
    # It would end this process's parent, the user's shell, once a batch has waited for so many seconds.
    "watchdog_timeout": 1e6,
    "page_size": 16, "chunked_prefill_size": 256, "max_total_tokens": 16384, "context_length": TINY_CONTEXT,
}  # fmt: skip


class InProcessSglang:
    """SGLang's scheduler and worker on a CPU, without the processes around them.

    To be protected, KV_CANARY_MODE must be set before it is made.
    """

    def __init__(self, folder: Path, requests: int, seed: int) -> None:
        """Build a tiny model in `folder`; at most `requests` of its requests run together.

        Raises UnsupportedEngine for a version that is not run on CPUs.
        """
        version = installed_version()
        check_version(version)
        check_device(version, _DEVICE)
        os.environ["HF_HUB_OFFLINE"] = "1"
        (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES["tiny"]), "utf-8")
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self.scheduler = _scheduler(
            _SETTINGS | {"model_path": str(folder), "max_running_requests": requests, "random_seed": seed}
        )
        draw_weights(self.scheduler.tp_worker.model_runner.model)
        self._random, self._requests = random.Random(seed), 0
        self._sent: list[Any] = []
        # Answers go nowhere: there is no process that turns them into text.
        for channel in (
            self.scheduler.ipc_channels.send_to_detokenizer,
            self.scheduler.ipc_channels.send_to_tokenizer,
        ):
            channel.send_output = lambda *_: None

    @property
    def steps(self) -> int:
        """Forwards so far."""
        return int(self.scheduler.forward_ct)

    def random_prompt(self, length: int) -> list[int]:
        """Token ids."""
        last = SHAPES["tiny"]["vocab_size"]
        return [self._random.randrange(_FIRST_TOKEN, last) for _ in range(length)]

    def add_request(self, prompt: list[int], tokens: int) -> None:
        """Queue a request that answers with exactly `tokens` tokens."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._requests += 1
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"request-{self._requests}", input_text=None, input_ids=array.array("q", prompt),
            input_embeds=None, mm_inputs=None, token_type_ids=None, sampling_params=sampling,
            return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
            stream=False,
        )  # fmt: skip
        self._sent.append(request)

    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._sent) or not self.scheduler.is_fully_idle()

    def run(self, poll: Callable[[], bool]) -> None:
        """Run SGLang's event loop; it calls `poll` where it looks for requests, and ends on False."""

        def receive() -> list[Any]:
            if not poll():
                self.scheduler.gracefully_exit = True
            sent, self._sent = self._sent, []
            return sent

        # An instance without a dictionary: its class takes the function. There is one scheduler in a process.
        receiver: Any = type(self.scheduler.request_receiver)
        receiver._pull_raw_reqs = lambda _: receive()
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()


def _scheduler(settings: dict[str, Any]) -> Any:
    """As SGLang's own scheduler process builds it."""
    from sglang.srt.managers.scheduler import Scheduler, configure_logger
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(**settings)
    configure_logger(arguments)
    arguments.resolve_once()
    arguments.check_server_args()
    ports = PortArgs.init_new(arguments)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Scheduler(arguments, ports)
