"""What is launched before vLLM's forward, and what after it: the order on a GPU, tested on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.engines.toolkit.token_digests import TokenDigests
from canary_obs.vocabulary import State
from tests.engines.vllm.real.call_order import recorded_calls
from tests.engines.vllm.real.rig import prompts


def test_only_the_comparison_of_old_bytes_precedes_the_forward(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.generate(prompts(2), 2)
    calls = recorded_calls(rig, monkeypatch)
    rig.start({"a": prompts(1, seed=3)[0]}, 1)
    rig.step()
    assert calls == [
        "join", "before_write", "forward", "compute_logits", "ALL", "forward_launched", "after_forward",
        "after_step", "leave",
    ]  # fmt: skip


def test_what_the_first_step_needs_was_run_at_attach(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    advanced: list[tuple[object, ...]] = []
    advance = TokenDigests.advance

    def recorded(digests: TokenDigests, requests: list[str], tokens: Any, ends: Any) -> Any:
        advanced.append((len(requests), tokens.dtype, tokens.shape, ends.dtype))
        return advance(digests, requests, tokens, ends)

    monkeypatch.setattr(TokenDigests, "advance", recorded)
    rig.adapter.warm_up()
    compiled, advanced[:] = advanced[0], []
    rig.generate(prompts(1), 2)
    assert advanced[0] == compiled
    assert "" not in rig.adapter._token_digests._absent


def test_drafting_changes_the_inputs_so_all_checks_precede_the_forward(
    make_rig: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    rig = make_rig(speculative_config=speculation, async_scheduling=False)
    rig.generate(prompts(2), 2)
    calls = recorded_calls(rig, monkeypatch)
    rig.start({"a": prompts(1, seed=3)[0]}, 1)
    rig.step()
    assert [call for call in calls if call in ("before_write", "forward_launched", "forward", "mark")] == [
        "before_write", "forward_launched", "forward",
    ]  # fmt: skip


def test_a_dummy_batch_waits_for_the_side_stream(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    rig.generate(prompts(2), 2)
    calls = recorded_calls(rig, monkeypatch)
    rig.runner._dummy_run(1)
    assert calls[:2] == ["join", "forward"]
    assert "before_write" not in calls


def test_a_forward_whose_view_cannot_be_completed_is_adopted(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and digests are added after the forward; without them the engine keeps serving."""
    rig = make_rig()
    plain = rig.generate(prompts(3), 6)
    rig.fresh()

    def fails(_: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(rig.adapter, "complete_view", fails)
        assert rig.generate(prompts(3), 6) == plain
    assert rig.canary.health.faults["step_view"] >= 6
    assert rig.canary.verdict()[0] is State.BLIND
    assert rig.generate(prompts(3, seed=7), 6)
    assert rig.settle() == []
    assert rig.canary.run.armed


def test_a_forward_that_fails_is_adopted_and_the_next_is_checked(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.generate(prompts(3), 6)
    rig.fresh()

    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(rig.runner.model, "forward", fails)
        rig.start({"a": prompts(1, seed=3)[0]}, 1)
        with pytest.raises(ZeroDivisionError):
            rig.step()
    assert rig.adapter.hooks._view is None
    assert rig.canary._depth == 0


def test_a_second_forward_in_a_step_takes_the_place_of_the_first(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    plain = rig.generate(prompts(3), 6)
    rig.fresh()
    forward, forwards = rig.runner._model_forward, rig.canary.step

    def twice(*given: Any, **named: Any) -> Any:
        forward(*given, **named)
        return forward(*given, **named)

    with monkeypatch.context() as doubled:
        doubled.setattr(rig.runner, "_model_forward", twice)
        assert rig.generate(prompts(3), 6) == plain
    assert rig.canary._depth == 0
    assert rig.canary.step >= forwards + 12
    assert rig.settle() == []
    # vLLM counted one forward a step.
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    assert all("the engine did not count" in reason for reason in reasons)
