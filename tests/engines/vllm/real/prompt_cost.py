"""What a prompt costs the engine's thread in the hooks: `python -m tests.engines.vllm.real.prompt_cost`.

A real vLLM on a CPU, as on a GPU's host: asynchronous scheduling, short steps, a pool so full that each
prompt displaces as many blocks as it takes, and caches that other data fills before each step. Printed, as
JSON, for each length of a prompt, on an engine without a canary and on one with it: CPU time of the thread in
microseconds (median and least of all prompts) by part, without the parts that it calls, `before` and `after`
the model's forward begins. With a canary, of one more prompt: what a GPU's host would launch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from torch.overrides import TorchFunctionMode

BLOCK = 16
LENGTHS = 512, 8192
PARTS = {  # by owner and method: what precedes the forward, in this order
    "canary_obs.engines.vllm.output_reports": ("attach_reports", "send_events", "send_counts", "send_tokens"),
    "canary_obs.engines.vllm.adapter.VllmAdapter": ("_follow",),
    "canary_obs.engines.vllm.block_changes.BlockChanges": ("report",),
    "canary_obs.engines.vllm.request_changes.RequestChanges": ("report",),
    "canary_obs.engines.vllm.step_hooks.StepHooks": ("begin_forward", "end_step"),
    "canary_obs.engines.vllm.runner_v1.V1Adapter": ("_view", "complete_view"),
    "canary_obs.engines.vllm.cached_blocks.CachedBlocks": ("settle",),
    "canary_obs.runtime.canary.CanaryRuntime": (
        "requests_changed", "before_write", "forward_launched", "after_forward", "after_step",
    ),
}  # fmt: skip
KERNELS = {
    "canary_obs.runtime.forward": (
        "start_forward", "compare_slots", "complete_slots", "verify_rows", "write_identities",
    ),
    "canary_obs.engines.toolkit.device_digests": ("follow_inputs", "follow_lists"),
}  # fmt: skip
_NO_LAUNCH = frozenset(
    {"__get__", "size", "stride", "dim", "data_ptr", "numel", "numpy", "view", "__getitem__"}
)


class Parts(TorchFunctionMode):
    """CPU time of a thread by part, each without the parts that it calls; and what it launches."""

    def __init__(self) -> None:
        super().__init__()
        self.us: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.before = True  # the model's forward has not begun
        self._parts, self._inner = ["vLLM"], [0]

    def wrap(
        self, patch: pytest.MonkeyPatch, owner: Any, name: str, part: str, *, launch: bool = False
    ) -> None:
        """Count the time of this method as a part."""
        original = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            if launch and self._parts[-1] != "kernels":
                self.launched[f"{self._when} {name}"] += 1
            self._parts.append(part)
            self._inner.append(0)
            started = time.thread_time_ns()
            try:
                return original(*given, **named)
            finally:
                spent = time.thread_time_ns() - started
                self.us[f"{self._when} {self._parts.pop()}"] += (spent - self._inner.pop()) / 1e3
                self._inner[-1] += spent

        patch.setattr(owner, name, timed)

    @property
    def _when(self) -> str:
        return "before:" if self.before else "after:"

    def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(called, "__name__", repr(called))
        if self._parts[-1] not in ("vLLM", "kernels", "schedule") and name not in _NO_LAUNCH:
            self.launched[f"{self._when} torch {name} ({self._parts[-1]})"] += 1
        return called(*args, **(kwargs or {}))


def instrument(
    patch: pytest.MonkeyPatch, parts: Parts, timed: dict[str, tuple[str, ...]],
    kernels: dict[str, tuple[str, ...]],
) -> None:  # fmt: skip
    """Time what is patched in classes and modules, before an engine binds it."""
    for at, names in timed.items():
        for name in names:
            parts.wrap(patch, resolve_name(at), name, f"{at.rpartition('.')[2]}.{name}")
    for at, names in kernels.items():
        for name in names:
            parts.wrap(patch, resolve_name(at), name, "kernels", launch=True)


@contextmanager
def engine(folder: Path, longest: int, patch: pytest.MonkeyPatch, parts: Parts) -> Iterator[Any]:
    """A rig whose prompts are forwarded whole."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from tests.engines.vllm.real.hook_calls import as_on_a_gpu
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.rig import Rig

    # It has code for them, which vLLM does not choose.
    patch.setattr(
        CPUAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(lambda *_: [MultipleOf(BLOCK)])
    )
    rig = Rig(
        make_model(folder, "llama"), block_size=BLOCK, max_model_len=longest + 64, async_scheduling=True,
        max_num_batched_tokens=longest + 64, num_gpu_blocks_override=longest // BLOCK + 80,
        hf_overrides={"max_position_embeddings": 4 * longest},
    )  # fmt: skip
    try:
        if rig._canary is not None:
            as_on_a_gpu(rig, patch)
        parts.before = True
        parts.wrap(patch, rig.core.scheduler, "schedule", "schedule")
        yield rig
    finally:
        rig.close()


class Prompts:
    """Serves prompts of one length to a rig, one by one."""

    def __init__(self, rig: Any, parts: Parts, length: int) -> None:
        self.rig, self._parts, self._length, self._number = rig, parts, length, 0
        self._draw = random.Random(length)
        self._others = np.zeros(64 << 20, dtype=np.uint8)

    def serve(self) -> None:
        """The step that computes a prompt, and those that end its request."""
        rig = self.rig
        self._number += 1
        name = f"{self._length}-{self._number}"
        rig.start({name: [self._draw.randrange(4, 1000) for _ in range(self._length)]}, 2)
        self._others += 1
        self._parts.us.clear()
        self._parts.launched.clear()
        self._parts.before = True
        rig.step()
        self.found = dict(self._parts.us), dict(self._parts.launched)
        rig.finish()
        rig.step(2)


def measure(folder: Path, length: int, prompts: int, mode: str) -> dict[str, Any]:
    """Of prompts of one length, on an engine whose canary has this mode."""
    from tests.engines.vllm.real.rig import keep_asynchronous

    parts, result, found = Parts(), dict[str, Any](), list[dict[str, float]]()
    with pytest.MonkeyPatch.context() as patch:
        keep_asynchronous(patch.setattr)
        instrument(patch, parts, PARTS, KERNELS)
        from canary_obs.engines.vllm import output_reports

        reports = tuple([getattr(output_reports, each.__name__) for each in output_reports.REPORTS])
        patch.setattr(output_reports, "REPORTS", reports)
        with engine(folder, length, patch, parts) as rig:
            _mark_forward(patch, rig, parts)
            served = Prompts(rig, parts, length)
            for number in range(prompts + 3):
                served.serve()
                if number >= 3:  # the pool is full
                    found.append(served.found[0])
            us = {name: [each.get(name, 0.0) for each in found] for name in {*chain.from_iterable(found)}}
            result["us"] = {
                name: [round(median(us[name]), 1), round(min(us[name]), 1)] for name in sorted(us)
            }
            if mode == "none":
                return result
            with parts:
                served.serve()
            result["launches"] = served.found[1]
            assert not rig.canary.health.faults, rig.canary.health.faults
    return result


def _mark_forward(patch: pytest.MonkeyPatch, rig: Any, parts: Parts) -> None:
    model = rig.runner.model
    forward = model.forward

    def marked(*given: Any, **named: Any) -> Any:
        parts.before = False
        return forward(*given, **named)

    patch.setattr(model, "forward", marked)


def main() -> None:
    """Measure each length in a process of its own, without a canary and with one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--mode", choices=("none", "log"))
    given = parser.parse_args()
    if given.mode is not None:
        with TemporaryDirectory() as folder:
            found = measure(Path(folder), given.lengths[0], given.prompts, given.mode)
        print(json.dumps(found))
        return
    own = {
        "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1",
        "KV_CANARY_ENDPOINT": "inproc", "KV_CANARY_WRITE_HISTORY": "0", "KV_CANARY_MODE": "log",
    }  # fmt: skip
    found = {}
    for length in given.lengths:
        for mode in ("none", "log"):
            again = ["-m", "tests.engines.vllm.real.prompt_cost", "--mode", mode, "--lengths", str(length)]
            again += ["--prompts", str(given.prompts)]
            run = [sys.executable, *again]
            said = subprocess.run(
                run, env=os.environ | own | {"KV_CANARY_MODE": mode}, stdout=subprocess.PIPE, check=True
            )
            found[f"{length}, {mode}"] = json.loads(said.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
