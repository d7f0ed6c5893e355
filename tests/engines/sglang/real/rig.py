"""One real SGLang scheduler in this process: its own event loop over requests that a test hands in."""

from __future__ import annotations

import array
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from canary_obs.engines.sglang.adapter import SglangAdapter
from canary_obs.engines.sglang.scheduler_canary import canary_of, detach_from_scheduler
from canary_obs.records import GroupCounters, Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Phase, Reason
from tests.engines.sglang.real import linear_attention, stand_ins

DEFAULTS: dict[str, Any] = {
    # After so many seconds in a batch that a test has left, it would end the parent of the test run.
    "watchdog_timeout": 1e6,
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "skip_tokenizer_init": True,
    "max_total_tokens": 2048, "max_running_requests": 8, "chunked_prefill_size": 128, "log_level": "warning",
    "mem_fraction_static": 0.2, "random_seed": 1,
}  # fmt: skip


class Rig:
    """A scheduler as SGLang builds it, and the canary that the plugin gave it."""

    def __init__(self, model: Path, rank: int = 0, **settings: Any) -> None:
        """`rank`: of the model's tensor ranks; each has a process of its own."""
        from sglang.srt.distributed import bootstrap
        from sglang.srt.managers.scheduler import Scheduler, configure_logger
        from sglang.srt.runtime_context import SpawnRanks, get_resources, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.interpreter import quicken

            quicken()
        stand_ins.attention()
        linear_attention.install()
        arguments = ServerArgs(model_path=str(model), **(DEFAULTS | settings))
        configure_logger(arguments)
        arguments.resolve_once()
        arguments.check_server_args()
        ports = PortArgs.init_new(arguments)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
        if bootstrap._PARALLEL_INITIALISED:  # by the first scheduler of this process; groups of one rank stay
            bootstrap.init_parallel_runtime = lambda **_: (
                bootstrap.maybe_init_shared_mooncake_transfer_engine(gpu_id=0)
            )
            get_resources().expert_location_metadata = None
        self.scheduler = scheduler = Scheduler(arguments, ports)
        self.answers: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.found: list[Violation] = []
        self._script: Iterator[Iterable[Any]] = iter(())
        # A frozen dataclass: its class takes the method. The newest rig's requests are those that come.
        type(scheduler.request_receiver)._pull_raw_reqs = lambda _: self._pull()
        for channel in (scheduler.ipc_channels.send_to_detokenizer, scheduler.ipc_channels.send_to_tokenizer):
            channel.send_output = self._output
        self.collect_from()

    def collect_from(self, canary: CanaryRuntime | None = None) -> None:
        """Collect what this canary finds, redetections too; by default the scheduler's canary."""
        given = canary_of(self.scheduler)
        self._canary = canary or (given.runtime if given else None)
        if self._canary is not None:
            keep = self._canary.delivery.deliver

            def deliver(found: list[Violation]) -> None:
                self.found += found
                keep(found)

            self._canary.delivery.deliver = deliver  # type: ignore[method-assign]

    @property
    def canary(self) -> CanaryRuntime:
        assert self._canary is not None, "this scheduler has no canary"
        return self._canary

    @property
    def adapter(self) -> SglangAdapter:
        adapter = self.canary._adapter
        assert isinstance(adapter, SglangAdapter)
        return adapter

    @property
    def runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    @property
    def table(self) -> Any:
        return self.runner.req_to_token_pool.req_to_token

    def close(self) -> None:
        """Detach what protects the scheduler."""
        detach_from_scheduler(self.scheduler)

    # Requests ------------------------------------------------------------------------------------------

    def request(self, name: str, prompt: list[int], tokens: int, **more: Any) -> Any:
        """As the tokenizer would send it; greedy, and never ended by a token. `more`: fields of it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=name, input_text=None, input_ids=array.array("q", prompt), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False, **more,
        )  # fmt: skip

    def run(self, script: Iterable[Iterable[Any]]) -> None:
        """Run SGLang's loop; each of its turns receives the next requests of the script, and ends with it."""
        self._script = iter(script)
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()

    def generate(self, prompts: dict[str, list[int]], tokens: int = 16) -> dict[str, list[int]]:
        """Answers to requests that all come at once; idle at its end."""
        self.run(self.until_done([self.request(name, prompt, tokens) for name, prompt in prompts.items()]))
        return {name: self.answers[name] for name in prompts}

    def until_done(self, requests: list[Any], turns: int = 3000) -> Iterator[Iterable[Any]]:
        """A script: the requests, then turns until all have finished, and some that are idle."""
        names = {request.rid for request in requests}
        yield requests
        for _ in range(turns):
            if names <= self.finished:
                break
            yield ()
        assert names <= self.finished, f"unfinished: {sorted(names - self.finished)}"
        yield from [()] * 3

    def idle_until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Turn without requests until the condition holds."""

        def script() -> Iterator[Iterable[Any]]:
            deadline = time.monotonic() + seconds
            while not condition():
                assert time.monotonic() < deadline, self.canary.verdict()
                yield ()

        self.run(script())

    def _pull(self) -> list[Any]:
        try:
            return list(next(self._script))
        except StopIteration:
            self.scheduler.gracefully_exit = True
            return []

    def _output(self, output: Any, _: Any = None) -> None:
        if hasattr(output, "finished_reasons"):
            ids = output.output_ids or output.decode_ids or [[]] * len(output.rids)
            for name, tokens, reason in zip(output.rids, ids, output.finished_reasons, strict=True):
                self.answers.setdefault(name, []).extend(tokens or ())
                if reason is not None:
                    self.finished.add(name)
        elif getattr(output, "rid", None):
            self.finished.add(output.rid)

    # The canary ----------------------------------------------------------------------------------------

    def settle(self) -> list[Violation]:
        """Everything checked, patrol and sweep included; all violations so far."""
        self.canary.check_everything()
        return self.found

    def reasons(self) -> Counter[tuple[Phase, Reason]]:
        return Counter((violation.phase, violation.reason) for violation in self.found)

    def counters(self, group: str = "full") -> GroupCounters:
        """As they reached the host last."""
        return group_counters(self.canary.state, self.canary.counter_reader)[group]

    def assert_checked(self, groups: Iterable[str]) -> None:
        """Heads, tails and a sweep have verified slots of each group, and nothing was left unverified."""
        for group in groups:
            counters = self.counters(group)
            for phase in (Phase.HEAD, Phase.TAIL, Phase.SWEEP):
                assert counters.verified[phase], (group, phase)
            assert counters.hashed[Phase.SWEEP], group
            assert not any(counters.unverified.values()), group

    def running(self, count: int = 2, at_least: int = 12) -> list[Any]:
        """Requests that decode now, the longest first; none while there are fewer, or shorter ones."""
        return decoding(self.scheduler, count, at_least)


def decoding(scheduler: Any, count: int, at_least: int) -> list[Any]:
    """Requests of a scheduler that decode now, as `Rig.running` has them."""
    requests = [request for request in scheduler.running_batch.reqs if len(request.output_ids) >= at_least]
    requests.sort(key=lambda request: -len(request.origin_input_ids))
    return requests if len(requests) >= count else []
