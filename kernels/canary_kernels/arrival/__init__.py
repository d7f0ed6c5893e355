"""Judge blocks whose load was reported complete: by what was sent, and by what lay there before."""

from canary_kernels.arrival.op import ARRIVAL_WORDS, Arrival, Unchanged, judge_arrivals

__all__ = ["ARRIVAL_WORDS", "Arrival", "Unchanged", "judge_arrivals"]
