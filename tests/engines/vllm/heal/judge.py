"""Says from which token on an answer is wrong, in an engine without faults.

An answer that differs need not be wrong. Whoever is preempted, ended or computed again changes who shares a
batch with whom, and so how sums are rounded: where two tokens are nearly as likely, the other one may win,
and all that follows differs. So each token of a differing answer is compared with what the model makes of
the tokens before it, computed anew: a token is right if it is as likely as the best one, within MARGIN.
"""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.heal.requests import Answer, Ask
from tests.engines.vllm.heal.serve import Served
from tests.engines.vllm.real.rig import Rig

MARGIN = 0.001  # of natural logarithms; rounding in float32, which all rows run in, stays far below


def judge(rig: Rig, requests: list[Ask], clean: Served, other: Served) -> None:
    """Set `wrong_from` and `behind` of the answers of `other` that differ from those of `clean`."""
    differing = [ask for ask in requests if _differ(clean.answers[ask.name], other.answers[ask.name])]
    for ask, behind in zip(differing, _behind(rig, differing, other), strict=True):
        answer = other.answers[ask.name]
        answer.behind = behind
        answer.wrong_from = next((at for at, gap in enumerate(behind) if gap > MARGIN), None)


def _differ(right: Answer, other: Answer) -> bool:
    """In the tokens that were delivered; one that ended with an error has fewer."""
    return right.tokens[: len(other.tokens)] != other.tokens


def _behind(rig: Rig, asks: list[Ask], served: Served) -> list[list[float]]:
    """By answer and token: how much less likely the token is than the best one."""
    from vllm import SamplingParams

    # A request for the prompt's logprobs reads nothing from the prefix cache.
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    texts = [[*ask.prompt, *served.answers[ask.name].tokens] for ask in asks]
    outputs = rig.llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    gaps = [
        list(map(_gap, output.prompt_logprobs, text)) for output, text in zip(outputs, texts, strict=True)
    ]
    return [own[len(ask.prompt) :] for own, ask in zip(gaps, asks, strict=True)]


def _gap(likely: dict[int, Any] | None, token: int) -> float:
    if likely is None:  # nothing comes before the first token
        return 0.0
    return float(max(one.logprob for one in likely.values()) - likely[token].logprob)
