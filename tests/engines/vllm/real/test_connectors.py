"""KV that a connector loads: whole blocks are set aside, and get a baseline when their bytes have arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.records import GroupCounters
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Cause, Phase, Reason, State
from tests.engines.vllm.real.copying_connector import LOADS
from tests.engines.vllm.real.rig import Rig, prompts

CONNECTORS = {
    "aligned": "CopyingConnector",
    "unaligned": "UnalignedAtOnce",
    "asynchronous": "UnalignedConnector",
}


def make(make_rig: Any, name: str) -> Rig:
    rig: Rig = make_rig(
        num_gpu_blocks_override=60,
        kv_transfer_config={
            "kv_connector": CONNECTORS[name], "kv_role": "kv_both",
            "kv_connector_module_path": "tests.engines.vllm.real.copying_connector",
        },
    )  # fmt: skip
    return rig


def counters(rig: Rig) -> GroupCounters:
    return group_counters(rig.canary.state, rig.canary.counter_reader)["full"]


def loaded(rig: Rig, prompt: list[int]) -> int:
    """Serve a prompt, lose its blocks to others, and serve it again: blocks loaded from the connector."""
    rig.generate([prompt], 2)
    assert rig.llm.reset_prefix_cache()
    rig.generate(prompts(8, seed=4), 2)  # takes the blocks that the prompt had
    assert rig.llm.reset_prefix_cache()
    before = LOADS["blocks"]
    rig.generate([prompt], 8)
    return LOADS["blocks"] - before


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_clean_connector_is_not_accused(make_rig: Any, name: str) -> None:
    rig = make(make_rig, name)
    asked = prompts(16)
    for seed in range(3):
        rig.generate(asked, 12)
        rig.generate(prompts(8, seed=seed + 10), 12)
    before = LOADS["blocks"]
    rig.generate(asked[::-1], 12)
    assert LOADS["blocks"] > before
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert counters(rig).unverified[Cause.BASELINE] > 0
    # Every loaded block that is still there has a baseline: nothing waits for bytes that have arrived.
    found = counters(rig).unverified[Cause.ADOPTED]
    rig.settle()
    assert counters(rig).unverified[Cause.ADOPTED] == found


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_loaded_block_that_is_damaged_later_is_found(make_rig: Any, name: str) -> None:
    rig = make(make_rig, name)
    prompt = prompts(1, shared=230)[0][:230]
    assert loaded(rig, prompt) >= 6
    assert rig.settle() == []
    first = rig.idle_blocks()[-1]  # of the prompt's blocks, freed in reverse, the first
    rig.layer_cache(0, 2)[first].view(torch.int32)[0, 3, 3] ^= 1 << 20
    assert {violation.slot // 32 for violation in rig.settle()} == {first}
    assert set(rig.reasons()) <= {(Phase.SWEEP, Reason.KV_DATA), (Phase.PATROL, Reason.KV_DATA)}


def test_bytes_that_arrive_after_they_were_reported_are_found(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(make_rig, "aligned")
    prompt = prompts(1, shared=230)[0][:230]
    rig.generate([prompt], 2)
    assert rig.llm.reset_prefix_cache()
    late: list[Any] = []
    from tests.engines.vllm.real.copying_connector import CopyingConnector

    def start_load_kv(connector: Any, forward_context: Any, **_: Any) -> None:
        for block, kept in connector._get_connector_metadata().loads:
            late.extend(zip(connector._caches, [block] * 3, kept, strict=True))

    rig.generate(prompts(8, seed=4), 2)
    assert rig.llm.reset_prefix_cache()
    monkeypatch.setattr(CopyingConnector, "start_load_kv", start_load_kv)
    rig.generate([prompt], 2)
    rig.settle()
    assert set(rig.reasons()) == {(Phase.HEAD, Reason.LOST_LOAD)}
    rig.found.clear()
    assert late
    for cache, block, kept in late:
        cache[block] = kept
    assert {violation.reason for violation in rig.settle()} == {Reason.KV_DATA}


def test_loads_that_are_not_reported_would_accuse(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canary_obs.engines.vllm.pending_events._record_loads", lambda *_: None)
    rig = make(make_rig, "asynchronous")
    loaded(rig, prompts(1, shared=230)[0][:230])
    assert {violation.reason for violation in rig.settle()} >= {Reason.KV_DATA}
