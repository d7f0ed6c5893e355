"""Run as a program: the V2 model runner on a CPU, its Triton kernels in the interpreter.

usage: interpreted.py CASES.json RESULTS.json, where the cases are {name: {"model", "engine", "prompts"}}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1", KV_CANARY_VERIFY_ON_HIT="1",
)  # fmt: skip


def stand_in_driver() -> None:
    """vLLM asks Triton for a driver; the interpreter needs none, so this one only answers."""
    import torch
    import triton.backends as backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    from tests.interpreter import quicken

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", "x86", 1)

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_benchmarker(self) -> Any:
            return lambda *_, **__: [0.0]

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int = 0) -> int:
            return 0

    backends.backends.clear()
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)
    _keep_masks_flags()
    quicken()


def _keep_masks_flags() -> None:
    """The interpreter makes bytes of flags that were loaded from memory, and then takes no mask of them."""
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.create_masked_load

    def create_masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return original(builder, pointers, mask, *rest)

    InterpreterBuilder.create_masked_load = create_masked_load


def main(cases: dict[str, dict[str, Any]], results: Path) -> None:
    """One process for all: importing vLLM takes longer than a case does."""
    stand_in_driver()
    report = {}
    for name, case in cases.items():
        accounts = case.pop("accounts", False)
        report[name] = instrumented(**case, accounts=accounts) | {"plain": plain(**case)}
        results.write_text(json.dumps(report))


def plain(model: str, engine: dict[str, Any], prompts: int) -> list[list[list[int]]]:
    """What vLLM answers without the canary."""
    from canary_obs.engines.vllm.worker import runtime_of
    from tests.engines.vllm.real.rig import Rig

    os.environ["KV_CANARY_MODE"] = "none"
    rig = Rig(Path(model), **engine)
    assert runtime_of(rig.worker) is None
    answers = ask(rig, prompts)
    rig.close()
    return answers


def ask(rig: Any, count: int) -> list[list[list[int]]]:
    """The same prompts twice, the second time from the end."""
    from tests.engines.vllm.real.rig import prompts

    asked = prompts(count, shared=100, groups=2)
    return [rig.generate(asked, 10), rig.generate(asked[::-1], 10)]


def instrumented(model: str, engine: dict[str, Any], prompts: int, accounts: bool = False) -> dict[str, Any]:
    """What the canary finds in a clean run, and after faults."""
    from tests.engines.vllm.real import (
        adopted,
        forwards,
        hidden,
        perturbed,
        prefix_hits,
        stale,
        tokens,
        walks,
    )
    from tests.engines.vllm.real.rig import Rig, count_sampled, prompts as made

    os.environ["KV_CANARY_MODE"] = "log"
    rig = Rig(Path(model), **engine)
    sampled = count_sampled(rig)
    report: dict[str, Any] = {"answers": ask(rig, prompts), "runner": type(rig.runner).__module__}
    report["clean"] = [repr(violation) for violation in rig.settle()]
    report |= {"sampled": max(sampled), "checks": rig.checks(), "state": list(map(str, rig.canary.verdict()))}
    report["swept"] = rig.canary.sweeper.last.total if rig.canary.sweeper.last else 0
    report["groups"] = [group.name for group in rig.canary.state.groups]
    rig.layer_cache(0, 0)[rig.idle_blocks()[0]].zero_()
    report["zeroed"] = sorted({violation.reason.value for violation in rig.settle()})
    if rig.adapter.vllm_groups[-1].draft:
        rig.found.clear()
        rig.draft_cache()[rig.idle_blocks()[-1]].zero_()
        own = (found.reason.value for found in rig.settle() if found.group == "draft")
        report["draft_zeroed"] = sorted(set(own))
    rig.start({"a": made(1, shared=100)[0], "b": list(range(50, 150))}, 60)
    rig.step(6)
    if (windows := rig.canary.swa.latest) is not None:
        report["windows"] = {"step": rig.canary.step, "scheduled": rig.scheduled_windows()}
        report["windows"]["reported"] = msgspec.to_builtins(windows)
    tables = rig.runner.block_tables.block_tables[0].gpu
    rows = [rig.runner.req_states.req_id_to_index[name] for name in rig.runner.req_states.req_id_to_index]
    tables[rows[:2]] = tables[rows[:2][::-1]]
    rig.found.clear()
    rig.step()
    tables[rows[:2]] = tables[rows[:2][::-1]]
    report["exchanged"] = sorted({violation.reason.value for violation in rig.settle()})
    report["order"] = order(rig, made(1, seed=11)[0])
    report["order_unseen"] = order(rig, made(1, seed=12)[0], unseen="compute_logits")
    if accounts:
        report["forwards"] = forwards.tried(rig, 2)
        report["tables"], report["tables_unseen"] = stale.tried(rig), stale.unseen(rig)
        report["walks"] = walks.tried(rig)
        report["hidden"] = hidden.tried(rig)
        report["damaged_hit"] = prefix_hits.damaged(rig)
    if accounts and "speculative_config" not in engine:
        report["tokens"] = tokens.tried(rig)
        report["adopted"] = adopted.tried(rig)
        report["hits"] = prefix_hits.tried(rig)
        report["perturbed"] = perturbed.tried(rig)
    rig.close()
    return report


def order(rig: Any, prompt: list[int], unseen: str = "") -> list[str]:
    """What a step consists of that computes a prompt and its only answer; `unseen`: not wrapped then."""
    import pytest

    from tests.engines.vllm.real.call_order import recorded_calls

    rig.finish()
    model = rig.runner.model
    with pytest.MonkeyPatch.context() as patch:
        if unseen:
            patch.setattr(model, unseen, getattr(type(model), unseen).__get__(model))
        calls = recorded_calls(rig, patch, "postprocess_sampled")
        rig.start({"c": prompt}, 1)
        rig.step()
    return calls


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
