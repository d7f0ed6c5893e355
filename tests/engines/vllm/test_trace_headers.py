"""How trace contexts of requests travel from the scheduler to the workers, without a vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from canary_obs.engines.vllm.trace_headers import TRACES_ATTRIBUTE, SentTraces, send_traces
from canary_obs.slot_facts import request_name

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def sent(headers: dict[str, Any]) -> Any:
    """The output that first schedules these requests."""
    requests = {name: SimpleNamespace(trace_headers=given) for name, given in headers.items()}
    output = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in headers])
    send_traces(SimpleNamespace(requests=requests), output)
    return output


def test_a_request_keeps_the_context_that_it_came_with() -> None:
    contexts = SentTraces()
    long = "x" * 5000
    contexts.note(sent({"a": {"traceparent": CALLER, "tracestate": "v=1"}, long: {"traceparent": CALLER}}))
    assert contexts.get("a") == contexts.get(request_name(long)) == CALLER
    assert contexts.get("b") is None


def test_headers_without_a_usable_context_are_not_sent() -> None:
    given = {
        "a": None,
        "b": {},
        "c": {"traceparent": "x" * 5000},
        "d": {"tracestate": "v=1"},
        "f": ["no mapping"],
    }
    assert not hasattr(sent(given), TRACES_ATTRIBUTE)
    assert not hasattr(sent({"e": {"traceparent": b"00-ab"}}), TRACES_ATTRIBUTE)


def test_outputs_of_versions_and_requests_without_headers_say_nothing() -> None:
    output = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="a"), SimpleNamespace(req_id="b")])
    send_traces(SimpleNamespace(requests={"a": SimpleNamespace()}), output)
    contexts = SentTraces()
    contexts.note(output)
    assert contexts.get("a") is None
