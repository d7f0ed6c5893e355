"""When a step of the V2 model runner ends; with a real one: real/test_failed_loads.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.engines.vllm.step_hooks import StepHooks


@pytest.mark.parametrize("late", [False, True])
def test_a_step_whose_connector_reports_after_sampling_ends_then(late: bool) -> None:
    calls: list[str] = []
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
    hooks = StepHooks(source, observer, streams, None, inputs_persist=True)
    hooks.late_reports = lambda: late
    hooks.after_launch.append(lambda: calls.append("launched"))
    hooks.after_checks.append(lambda: calls.append("checked"))
    compute_logits = hooks.around_compute_logits(lambda: calls.append("logits"))

    def sample_tokens() -> None:
        compute_logits()
        calls.append("connector")

    hooks.around_execute_model(lambda output: None)(SimpleNamespace(total_num_scheduled_tokens=1))
    hooks.around_sample_tokens(sample_tokens)()
    end = ["end", "checked", "tasks"]
    sampled = ["logits", "connector", *end] if late else ["logits", *end, "connector"]
    assert calls == ["output", "launched", *sampled]
    hooks.stop()
