"""A finding of a real vLLM has the trace context that its request came with."""

from __future__ import annotations

from typing import Any

from canary_obs.records import Violation
from tests.engines.vllm.real.rig import prompts
from tests.engines.vllm.real.tokens import garbled_prompt

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_finding_names_the_span_that_sent_its_request(make_rig: Any) -> None:
    from vllm import SamplingParams

    rig = make_rig()
    sent: list[Violation] = []
    send = rig.canary.reporter.send_violations

    def keep(found: list[Violation]) -> None:
        sent.extend(found)
        send(found)

    rig.canary.reporter.send_violations = keep
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for name, headers in (("traced", {"traceparent": CALLER}), ("plain", None)):
        prompt = {"prompt_token_ids": prompts(1, seed=len(name))[0]}
        rig.llm.llm_engine.add_request(name, prompt, sampling, trace_headers=headers)
    with garbled_prompt(rig):
        rig.finish()
        rig.settle()
    known = {row.request.partition("-")[0]: row.traceparent for row in sent if row.request is not None}
    assert known == {"traced": CALLER, "plain": None}
