"""Digests of the token ids that vLLM itself keeps for each request, advanced by what is new."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.checks import Backend
from canary_kernels.digest import extend_chains
from canary_kernels.layout import CHAIN_ANCHOR, signed

_ANCHOR = signed(CHAIN_ANCHOR)
_Ints = NDArray[np.signedinteger[Any]]


class TokenDigests:
    """The chain over each request's computed tokens, kept row by row as the batch lies."""

    def __init__(self, backend: Backend) -> None:
        """`backend`: one of the CPU's."""
        self._backend = backend
        self._waiting: dict[str, tuple[int, int]] = {}  # left the batch, may come back: tokens, digest
        self._requests: list[str] = []  # as of the last step
        self._counts = np.zeros(0, dtype=np.int64)  # tokens in the digest
        self._digests = np.zeros(0, dtype=np.int64)
        self._shown = torch.from_numpy(self._digests)

    def forget(self, requests: Iterable[str]) -> None:
        """These ids ended, or stand for other tokens from now on."""
        for request in requests:
            self._waiting.pop(request, None)
            if request in self._requests:
                self._start_over(self._requests.index(request))

    def advance(self, requests: list[str], tokens: _Ints, ends: _Ints) -> Tensor:
        """int64 [n] on the CPU, valid until the next call: chain over the first ends[i] ids of row i.

        tokens int32 [rows, width], ends int32 [n].
        """
        # Most batches are the last one with a token more for each: no work per request then.
        if requests != self._requests:
            self._seat(requests)
        extend_chains(self._backend, tokens, ends, self._counts, self._digests)
        return self._shown

    def _start_over(self, row: int) -> None:
        self._counts[row], self._digests[row] = 0, _ANCHOR

    def _seat(self, requests: list[str]) -> None:
        known = self._waiting
        known |= zip(
            self._requests, zip(self._counts.tolist(), self._digests.tolist(), strict=True), strict=True
        )
        seated = [known.pop(request, (0, _ANCHOR)) for request in requests]
        self._counts, self._digests = np.array(seated, dtype=np.int64).reshape(-1, 2).T.copy()
        self._requests, self._shown = requests, torch.from_numpy(self._digests)
