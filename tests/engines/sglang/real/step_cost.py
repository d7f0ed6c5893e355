"""What a step costs the scheduler's thread in the hooks: `python -m tests.engines.sglang.real.step_cost`.

A real SGLang on a CPU, with the hooks and views of a GPU's host: overlap scheduling, short steps, launches
that repeat replayed, and caches that other data fills before each step. Printed, as JSON, for each kind of
step: CPU time of the thread in microseconds (median and least) by part, without the parts that it calls,
`before` and `after` the model's forward begins; of one more such step, what a GPU's host would launch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.real import hook_calls, prompt_cost

PARTS = {
    "canary_obs.engines.sglang.request_chains.RequestChains": ("advance", "next_tokens"),
    "canary_obs.engines.sglang.device_views.DeviceViews": ("build", "keep_late", "_copy_rows"),
    "canary_obs.runtime.canary.CanaryRuntime": (
        "before_write", "forward_launched", "after_forward", "after_step",
    ),
}  # fmt: skip
KERNELS = {
    "canary_obs.runtime.forward": prompt_cost.KERNELS["canary_obs.runtime.forward"],
    "canary_obs.engines.sglang.device_views": ("keep_decode",),
}
PROMPTS = 512, 8192
_MODEL = "llama"


class Steps:
    """What each step of a scheduler took, by its kind."""

    def __init__(self, parts: prompt_cost.Parts) -> None:
        self.us: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.launched: dict[str, Counter[str]] = {}
        self.counts_launches = False
        self._parts, self._last, self._others = parts, [], np.zeros(32 << 20, dtype=np.uint8)

    def around(self, run_batch: Any) -> Any:
        """Wraps the scheduler's `run_batch`, hooks and all."""

        def measured(batch: Any, *given: Any, **named: Any) -> Any:
            kind, parts = self._kind(batch), self._parts
            self._others += 1
            parts.us.clear()
            parts.launched.clear()
            parts.before = True
            if self.counts_launches:
                with parts:
                    result = run_batch(batch, *given, **named)
                self.launched[kind] = Counter(parts.launched)
            else:
                result = run_batch(batch, *given, **named)
                self.us[kind].append(dict(parts.us))
            return result

        return measured

    def _kind(self, batch: Any) -> str:
        names = [request.rid for request in batch.reqs]
        same, self._last = names == self._last, names
        mode = batch.forward_mode.name
        if mode == "DECODE":
            return f"DECODE, {len(names)} requests" + ("" if same else " that changed")
        return f"{mode}, {len(names)} requests, {sum(batch.extend_lens)} tokens"


def script(rig: Any, running: int, lengths: Iterable[int], rounds: int, seed: int) -> Iterator[Any]:
    """Requests that decode for long, to which prompts come one by one, each answered with two tokens."""
    draw = random.Random(seed)

    def request(name: str, length: int, tokens: int) -> Any:
        return rig.request(name, [draw.randrange(4, 1000) for _ in range(length)], tokens)

    yield [request(f"{seed}.running.{at}", 64, 2000) for at in range(running)]
    yield from [()] * 16
    for number in range(rounds):
        for length in lengths:
            yield [request(f"{seed}.{length}.{number}", length, 2)]
            yield from [()] * 8
    from sglang.srt.managers.io_struct import AbortReq

    yield [AbortReq(rid=f"{seed}.running.{at}") for at in range(running)]
    yield from [()] * 6


def measure(folder: Path, running: int, rounds: int, *, mixed: bool) -> dict[str, Any]:
    """Steps of a scheduler with so many requests that decode, and prompts that come."""
    from canary_obs.engines.sglang import adapter
    from tests.engines.sglang.real.models import make_model
    from tests.engines.sglang.real.rig import Rig

    parts = prompt_cost.Parts()
    steps = Steps(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "concurrent", lambda device: True)
        prompt_cost.instrument(patch, parts, PARTS, KERNELS)
        rig = Rig(
            make_model(folder, _MODEL), disable_overlap_schedule=False, enable_mixed_chunk=mixed,
            chunked_prefill_size=max(PROMPTS) * 2, max_total_tokens=120_000, max_running_requests=running + 4,
            context_length=16384, json_model_override_args='{"max_position_embeddings": 16384}',
        )  # fmt: skip
        try:
            hook_calls.as_on_a_gpu(rig, patch)
            _mark_forward(patch, rig, parts)
            patch.setattr(rig.scheduler, "run_batch", steps.around(rig.scheduler.run_batch))
            rig.run(script(rig, running, PROMPTS, 1, seed=1))
            steps.us.clear()
            rig.run(script(rig, running, PROMPTS, rounds, seed=2))
            steps.counts_launches = True
            rig.run(script(rig, running, PROMPTS, 1, seed=3))
            assert not rig.canary.health.faults, rig.canary.health.faults
            assert not rig.settle(), rig.found
        finally:
            rig.close()
    return {kind: _summary(kind, steps) for kind in sorted(steps.us)}


def _summary(kind: str, steps: Steps) -> dict[str, Any]:
    found = steps.us[kind]
    names = sorted({name for each in found for name in each if not name.endswith(("SGLang", "kernels"))})
    sums = {
        when: [sum(each.get(name, 0.0) for name in names if name.startswith(when)) for each in found]
        for when in ("before:", "after:")
    }
    columns = {name: [each.get(name, 0.0) for each in found] for name in names}
    return {
        "steps": len(found),
        "us": {
            name: [round(median(values), 1), round(min(values), 1)]
            for name, values in (columns | {f"{when} all": sums[when] for when in sums}).items()
        },
        "launches": dict(steps.launched.get(kind, {})),
    }


def _mark_forward(patch: pytest.MonkeyPatch, rig: Any, parts: prompt_cost.Parts) -> None:
    forward = rig.runner._forward_raw

    def marked(*given: Any, **named: Any) -> Any:
        parts.before = False
        return forward(*given, **named)

    patch.setattr(rig.runner, "_forward_raw", marked)


def main() -> None:
    """Measure, with and without mixed batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--mixed", action="store_true", help="prompts join the batch that decodes")
    given = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": "inproc",
        "KV_CANARY_WRITE_HISTORY": "0", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    from tests.engines.sglang.real import stand_ins, streams

    stand_ins.install()
    streams.install()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with TemporaryDirectory() as folder:
        found = measure(Path(folder), given.running, given.rounds, mixed=given.mixed)
    print(json.dumps(found, indent=1), file=sys.stdout)


if __name__ == "__main__":
    main()
