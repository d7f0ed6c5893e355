"""A finding of a real SGLang has the trace context that its request came with."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from canary_obs.engines.sglang import request_traces
from canary_obs.engines.sglang.request_rows import row_of
from canary_obs.records import Violation
from canary_obs.vocabulary import Reason
from tests.engines.sglang.real.planted import DECODED
from tests.engines.sglang.real.traffic import prompts

_TRACE = "ab" * 16
CALLER = f"00-{_TRACE}-{'cd' * 8}-01"


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `--enable-trace`, but for where the spans go."""
    from opentelemetry.sdk.trace import TracerProvider
    from sglang.srt.observability import trace

    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", TracerProvider().get_tracer("sglang"))


def _time_stats(name: str, headers: dict[str, str]) -> Any:
    """Of a request on its way to the scheduler, as the tokenizer makes them."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    made = APIServerReqTimeStats(disagg_mode=DisaggregationMode.NULL)
    made.init_trace_ctx(name, None, headers)
    made.set_created_time()
    return pickle.loads(pickle.dumps(made))


def _serve(rig: Any) -> dict[str, str | None]:
    """Two requests, one of them traced, have a wrong table entry each: their trace contexts."""
    sent: list[Violation] = []
    send = rig.canary.reporter.send_violations

    def keep(found: list[Violation]) -> None:
        sent.extend(found)
        send(found)

    def script() -> Iterator[Iterable[Any]]:
        asked, other = prompts(2).values()
        stats = _time_stats("traced", {"traceparent": CALLER})
        yield [rig.request("traced", asked, 60, time_stats=stats), rig.request("plain", other, 60)]
        while not (running := rig.running(2, DECODED)):
            yield ()
        for request in running:  # an entry of its table leads to another slot of its own
            own, last = rig.table[row_of(request)], len(request.origin_input_ids) - 1
            own[last] = own[last - 1]
        yield from [()] * 6

    rig.canary.reporter.send_violations = keep
    rig.run(script())
    rig.settle()
    assert {row.reason for row in sent} == {Reason.POSITION, Reason.CHAIN}
    return {row.request: row.traceparent for row in sent if row.request is not None}


def test_a_finding_has_the_trace_of_its_request(make_rig: Any) -> None:
    rig = make_rig(enable_trace=True)
    found = _serve(rig)
    assert found.keys() == {"traced", "plain"}
    assert found["plain"] is None
    span = found["traced"]
    assert span is not None
    version, trace, parent, _ = span.split("-")
    assert (version, trace) == ("00", _TRACE)
    assert parent != "cd" * 8, "that of SGLang's own span, whose parent is the client's"
    assert rig.canary.health.faults == {}


def test_where_nothing_is_traced_no_request_costs_a_call(make_rig: Any) -> None:
    rig = make_rig()
    assert "_add_request_to_queue" not in vars(rig.scheduler)
    assert set(_serve(rig).values()) == {None}


def test_what_cannot_be_read_is_a_fault_and_the_request_goes_on(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("another tracer")

    monkeypatch.setattr(request_traces, "traceparent_of", broken)
    rig = make_rig(enable_trace=True)
    stats = _time_stats("traced", {"traceparent": CALLER})
    asked = next(iter(prompts(1).values()))
    rig.run(rig.until_done([rig.request("traced", asked, 3, time_stats=stats)]))
    assert len(rig.answers["traced"]) == 3
    assert rig.canary.health.faults == {"evidence": 1}
