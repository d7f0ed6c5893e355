"""Judge blocks whose load was reported complete: by what was sent, and by what lay there before."""

from canary_kernels.arrival.columns import ARRIVAL_WORDS, EDGE_WORDS, Arrival, Edge, Unchanged
from canary_kernels.arrival.load import ArrivedLoad
from canary_kernels.arrival.op import fold_records, judge_arrivals, keep_arrivals, weigh_arrivals
from canary_kernels.arrival.weighed import WeighedLoad

__all__ = [
    "ARRIVAL_WORDS",
    "EDGE_WORDS",
    "Arrival",
    "ArrivedLoad",
    "Edge",
    "Unchanged",
    "WeighedLoad",
    "fold_records",
    "judge_arrivals",
    "keep_arrivals",
    "weigh_arrivals",
]
