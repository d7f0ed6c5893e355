"""Chain digests of the reference engine's token lists, advanced by the tokens that are new in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from canary_kernels.hashing import mix64
from canary_kernels.layout import CHAIN_ANCHOR, signed
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens
from canary_obs.reference_engine.scheduling.request import Request

_ANCHOR = signed(CHAIN_ANCHOR)


class PrefixDigests:
    """The chain over each running request's computed tokens, kept by the request's row.

    With a `ratio`, over the surrogate tokens of its complete runs, and counts are in runs. With `first`,
    entry p has the token of position p + first.
    """

    # Not the toolkit's TokenDigests, which take one token matrix: here each request has a list of its own,
    # and entries of compressed groups need surrogate tokens.

    def __init__(self, max_running: int, ratio: int = 1, first: int = 0) -> None:
        self._ratio, self._first = ratio, first
        self._owner = np.full(max_running, -1, dtype=np.int64)  # serial of the request that has the row
        self._count = np.zeros(max_running, dtype=np.int64)  # tokens, or runs, in the digest
        self._digest = np.zeros(max_running, dtype=np.int64)

    def advance(self, requests: Sequence[Request], counts: Sequence[int] | None = None) -> Tensor:
        """int64 [n] on the CPU: chain over the first `counts` tokens of each request; None = all computed."""
        rows = np.array([request.row for request in requests], dtype=np.int64)
        serials = np.array([request.serial for request in requests], dtype=np.int64)
        ratio, first = self._ratio, self._first
        counts = [request.computed for request in requests] if counts is None else counts
        ends = np.array(counts, dtype=np.int64) // ratio
        starts = self._count[rows]
        # The row has another request now, or its request was preempted and restarts.
        fresh = (self._owner[rows] != serials) | (starts > ends)
        starts[fresh] = 0
        digests = self._digest[rows]
        digests[fresh] = _ANCHOR
        lengths = ends - starts
        bounds = np.zeros(len(requests) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        if bounds[-1]:
            spans = (starts * ratio + first).tolist(), (ends * ratio + first).tolist()
            parts = [r.tokens[a:b] for r, a, b in zip(requests, *spans, strict=True)]
            tokens = surrogate_tokens(np.concatenate(parts), ratio)
            positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - starts, lengths)
            mixed = mix64(torch.from_numpy(tokens), torch.from_numpy(positions)).numpy()
            sums = np.zeros(bounds[-1] + 1, dtype=np.int64)
            np.cumsum(mixed, out=sums[1:])
            digests += sums[bounds[1:]] - sums[bounds[:-1]]
        self._owner[rows], self._count[rows], self._digest[rows] = serials, ends, digests
        return torch.from_numpy(digests)
