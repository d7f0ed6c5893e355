"""The tokens that a forward ought to add, from the oracle of mock traffic or the requests' own lists."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request


def expected_tokens(batch: ForwardBatch) -> NDArray[np.int64]:
    """int64 [num_tokens] from the oracle of mock traffic, else from the requests' token lists."""
    requests, extends = batch.requests, batch.extends
    if len(requests) == sum(extends):  # one token each: this takes half the time
        next_ids = (r.tokens[r.computed] if r.sampling.oracle is None else _known(r, 1)[0] for r in requests)
        return np.fromiter(next_ids, np.int64, len(requests))
    spans = [_known(r, n) for r, n in zip(requests, extends, strict=True)]
    return np.concatenate(spans, dtype=np.int64)


def _known(request: Request, extend: int) -> NDArray[np.int32]:
    oracle, start = request.sampling.oracle, request.computed
    stop = start + extend
    if oracle is None:
        return request.tokens[start:stop]
    known = min(stop, request.length)  # later tokens are the draft model's proposals
    return np.concatenate([oracle.tokens(start, known), request.tokens[known:stop]])
