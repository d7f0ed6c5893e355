"""When a step of the V2 model runner ends; with a real one: real/test_failed_loads.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.engines.vllm.step_hooks import StepHooks
from canary_obs.errors import KVCacheViolation
from tests.service.fakes import violation as a_violation


def output_of(tokens: int) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": tokens} if tokens else {}
    )


def hooks_of(calls: list[str], late: bool, *, drafts: Any = None, inputs_persist: bool) -> StepHooks:
    source: Any = SimpleNamespace(
        forward_counted=False,
        follow_output=lambda output, observer: calls.append("output"),
        end_step=lambda observer: calls.append("end"),
    )
    observer: Any = SimpleNamespace(
        overhead={"adapter": 0.0}, idle=lambda: False, after_forward=None,
        after_step=lambda: calls.append("tasks"),
    )  # fmt: skip
    device = torch.device("cpu")
    streams = ForwardStream(device), SideStream(device, enabled=False)
    hooks = StepHooks(source, observer, streams, drafts, inputs_persist=inputs_persist)
    hooks.reported_at_sampling = True
    hooks.late_reports = lambda: late
    hooks.after_launch.append(lambda: calls.append("launched"))
    hooks.after_checks.append(lambda: calls.append("checked"))
    return hooks


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_with_drafts_only_what_has_arrived_is_judged_after_sampling(late: bool, drafts: bool) -> None:
    """The step's inputs change as it samples: its checks cannot wait for the connector's report."""
    calls: list[str] = []
    drafting: Any = SimpleNamespace(pending=True, fail=lambda _: None, end=lambda _: calls.append("drafted"))
    hooks = hooks_of(calls, late, drafts=drafting if drafts else None, inputs_persist=False)
    around = hooks.around_drafting if drafts else hooks.around_sample_tokens
    hooks.around_execute_model(lambda output: None)(output_of(1))
    around(lambda: calls.append("connector"))()
    arrived = ["end"]
    end = ["checked"] if drafts else ["checked", "tasks"]
    drafted = ["drafted", "tasks"] if drafts else []
    sampled = [*end, "connector", *arrived] if late else [*arrived, *end, "connector"]
    assert calls == ["output", "launched", *sampled, *drafted]
    around(lambda: None)()
    assert calls.count("end") == 1
    hooks.stop()


def test_what_a_step_has_loaded_that_was_not_sampled_is_not_judged() -> None:
    calls: list[str] = []
    hooks = hooks_of(calls, late=True, inputs_persist=False)
    execute_model = hooks.around_execute_model(lambda output: None)
    execute_model(output_of(1))
    execute_model(output_of(0))
    hooks.around_sample_tokens(lambda: None)()
    assert "end" not in calls
    hooks.stop()


@pytest.mark.parametrize("late", [False, True])
def test_a_step_whose_connector_reports_after_sampling_ends_then(late: bool) -> None:
    calls: list[str] = []
    hooks = hooks_of(calls, late, inputs_persist=True)
    compute_logits = hooks.around_compute_logits(lambda: calls.append("logits"))

    def sample_tokens() -> None:
        compute_logits()
        calls.append("connector")

    hooks.around_execute_model(lambda output: None)(output_of(1))
    hooks.around_sample_tokens(sample_tokens)()
    end = ["end", "checked", "tasks"]
    sampled = ["logits", "connector", *end] if late else ["logits", *end, "connector"]
    assert calls == ["output", "launched", *sampled]
    hooks.stop()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("violated", [False, True])
def test_what_fails_as_a_step_ends_is_a_fault_of_ours_and_a_violation_is_not(
    late: bool, violated: bool
) -> None:
    calls: list[str] = []
    hooks = hooks_of(calls, late, inputs_persist=False)
    source: Any = hooks._source
    observer: Any = hooks.observer
    observer.fault = lambda part, error: calls.append(f"fault in {part}: {error}")

    def fails(_: Any) -> None:
        raise KVCacheViolation((a_violation(),)) if violated else LookupError("planted")

    source.end_step = fails
    execute_model = hooks.around_execute_model(lambda output: "launched")
    sample_tokens = hooks.around_sample_tokens(lambda: "sampled")

    def step() -> None:
        assert execute_model(output_of(1)) == "launched"
        assert sample_tokens() == "sampled"

    if violated:
        with pytest.raises(KVCacheViolation):
            step()
    else:
        step()
        assert calls.count("fault in announce: planted") == 1
    hooks.stop()
