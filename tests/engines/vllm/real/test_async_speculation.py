"""V1 with asynchronous scheduling and a draft model at once.

vLLM turns asynchronous scheduling off on CPUs; here it is turned on again, and all but the overlap is real:
steps are scheduled before the last one's rejections are known to the host.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.device_digests import InputDigests
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.rig import count_sampled, keep_asynchronous, prompts
from tests.engines.vllm.real.test_clean import count_preemptions


@pytest.fixture
def make_async(make_rig: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_asynchronous(monkeypatch.setattr)
    speculation = {"method": "draft_model", "model": str(models("llama_near")), "num_speculative_tokens": 3}
    return functools.partial(
        make_rig, async_scheduling=True, speculative_config=speculation, max_model_len=512
    )


def test_no_violation_and_same_outputs(make_async: Any) -> None:
    asked = prompts(16)
    rig = make_async(num_gpu_blocks_override=60)
    assert type(rig.core.scheduler).__name__ == "AsyncScheduler"
    assert rig.runner.use_async_spec_decode
    preempted, sampled = count_preemptions(rig), count_sampled(rig)
    answers = [rig.generate(asked, 24), rig.generate(asked[::-1], 24)]
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert [group.name for group in rig.canary.state.groups] == ["full", "draft"]
    assert sampled >= {1, 2, 3, 4}
    assert preempted
    assert rig.checks() > 100_000
    plain = make_async(num_gpu_blocks_override=60, canary={"mode": "none"})
    assert [plain.generate(asked, 24), plain.generate(asked[::-1], 24)] == answers


def test_digests_that_kept_rejected_drafts_would_accuse(
    make_async: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(count: int, device: torch.device, drafts: int) -> InputDigests:
        assert drafts == 3
        return InputDigests(count, device)

    monkeypatch.setattr("canary_obs.engines.vllm.runner_v1.InputDigests", forgetful)
    rig = make_async()
    rig.generate(prompts(2), 16)
    assert {violation.reason for violation in rig.settle()} >= {Reason.TOKEN}


def test_rows_exchanged_and_a_bit_flipped(make_async: Any) -> None:
    rig = make_async()
    first, second = prompts(2, groups=2)
    rig.start({"a": first, "b": second}, 60)
    rig.step(6)
    assert rig.settle() == []
    table = rig.runner.input_batch.block_table[0].block_table.np
    table[[0, 1]] = table[[1, 0]]
    rig.step()
    table[[0, 1]] = table[[1, 0]]
    rig.settle()
    assert (Phase.HEAD, Reason.TOKEN) in rig.reasons()
    assert {violation.request[:1] for violation in rig.found if violation.request} == {"a", "b"}
    rig.finish()
    rig.step()
    rig.found.clear()
    block = rig.idle_blocks()[0]
    rig.layer_cache(0, 0)[block].view(torch.int32)[1, 7, 3] ^= 1 << 11
    assert {(violation.group, violation.reason) for violation in rig.settle()} >= {("full", Reason.KV_DATA)}


def test_a_runner_that_does_not_correct_its_counts_is_refused(
    make_async: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from canary_obs.engines.vllm.runner_v1 import V1Adapter
    from canary_obs.errors import UnsupportedEngine

    rig = make_async(canary={"mode": "none"})
    monkeypatch.delattr(rig.runner, "use_async_spec_decode")
    with pytest.raises(UnsupportedEngine, match="use --no-async-scheduling"):
        V1Adapter(rig.runner)
