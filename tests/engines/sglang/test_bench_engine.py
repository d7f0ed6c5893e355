"""The bench's engines: one that waits for its turn leaves the device to the one under load."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.bench import sglang_engine, sglang_taps
from canary_obs.bench.sglang_flips import _buffers
from canary_obs.bench.sglang_loads import SglangEngine, SglangLoads, run_load
from canary_obs.engines.sglang import scheduler_canary


class _Runtime:
    idled = 0

    def idle(self) -> bool:
        self.idled += 1
        return True


def test_a_canary_does_nothing_while_its_engine_waits_for_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each load begins at the speed of an engine that is alone on its GPU."""
    runtime, scheduler = _Runtime(), SimpleNamespace()
    vars(scheduler)[scheduler_canary._ATTRIBUTE] = SimpleNamespace(runtime=runtime)
    happened: list[Any] = []
    monkeypatch.setattr(sglang_taps, "launch_as_alone", lambda: happened.append("as alone"))
    monkeypatch.setattr(sglang_taps, "take_core", lambda number: happened.append(f"core of round {number}"))

    def ask(what: str, seed: int = 0) -> Any:
        sglang_taps._command(scheduler, what, str(tmp_path / "answer"), seed)
        return json.loads((tmp_path / "answer").read_text("utf-8"))

    def note(what: str) -> None:
        happened.append((what, runtime.idle(), runtime.idled))

    def lines() -> Any:
        for line in ('["decode", 5]', '["few", 6]'):
            note("waits")
            yield line

    for line in sglang_engine._requests(SglangEngine(None, ask, 9), lines()):
        note(line)
    assert happened == [
        ("waits", False, 0), "as alone", "core of round 5", ('["decode", 5]', True, 1),
        ("waits", False, 1), "as alone", "core of round 6", ('["few", 6]', True, 2),
        "as alone", "core of round 0",
    ]  # fmt: skip
    assert runtime.idle(), "as it was"


def test_a_load_whose_requests_never_decode_together_says_so() -> None:
    """SGLang runs fewer at once than it was asked to, where it has too few states for them."""

    class Engine:
        def generate(self, **_: Any) -> None:
            """Answered."""

    def ask(what: str, _seed: int = 0) -> Any:
        return (
            {"steps": [[0.1 * number, "DECODE", 31, False, {}] for number in range(60)]}
            if what == "end"
            else {}
        )

    loads = SglangLoads(
        requests=32, context=16, few=8, few_context=16, steps=64, prefill=16, prefills=1, mixed=1
    )
    with pytest.raises(LookupError, match="0 steps decoded all 32 requests, and none more than 31"):
        run_load("decode", SglangEngine(Engine(), ask, 9), loads, 1)


def test_bits_are_flipped_in_states_as_well() -> None:
    full = SimpleNamespace(k_buffer=[torch.zeros(4, 2)], v_buffer=[torch.ones(4, 2)])
    held = SimpleNamespace(conv=[torch.zeros(3, 5, 6)], temporal=torch.ones(3, 5, 7))
    pool = SimpleNamespace(full_kv_pool=full, mamba_pool=SimpleNamespace(mamba_cache=held))
    found = _buffers(pool)
    assert {group: [tuple(each.shape) for each in buffers] for group, buffers in found.items()} == {
        "full": [(4, 2)] * 2, "state": [(5, 6)] * 3 + [(5, 7)] * 3
    }  # fmt: skip
    assert list(_buffers(full)) == ["full"]
