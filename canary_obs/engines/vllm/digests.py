"""Digests of the token ids that vLLM itself keeps for each request, advanced by what is new."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from canary_kernels.hashing import mix64
from canary_kernels.layout import CHAIN_ANCHOR, signed

_ANCHOR = signed(CHAIN_ANCHOR)
_Ints = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]


class TokenDigests:
    """The chain over each request's computed tokens. Memory: three words per request."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # request -> tokens in the digest, digest

    def forget(self, requests: Iterable[str]) -> None:
        """These ids ended, or stand for other tokens from now on."""
        for request in requests:
            self._known.pop(request, None)

    def advance(self, requests: Sequence[str], tokens: _Ints, ends: _Ints) -> Tensor:
        """int64 [n] on the CPU: chain over the first ends[i] ids of row i of `tokens`."""
        digests = np.empty(len(requests), dtype=np.int64)
        pieces: list[_Ints] = []
        spans: list[tuple[int, int, int]] = []
        for row, (request, end) in enumerate(zip(requests, ends.tolist(), strict=True)):
            start, digests[row] = self._known.get(request, (0, _ANCHOR))
            if start > end:
                start, digests[row] = 0, _ANCHOR
            if start < end:
                pieces.append(tokens[row, start:end])
                spans.append((row, start, end))
        if spans:
            self._add(digests, np.concatenate(pieces), spans)
            for row, _, end in spans:
                self._known[requests[row]] = end, int(digests[row])
        return torch.from_numpy(digests)

    def _add(self, digests: _Ints, ids: _Ints, spans: list[tuple[int, int, int]]) -> None:
        rows, starts, ends = np.array(spans, dtype=np.int64).T
        bounds = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=bounds[1:])
        positions = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], ends - starts)
        mixed = mix64(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(positions)).numpy()
        digests[rows] += np.add.reduceat(mixed, bounds[:-1])
