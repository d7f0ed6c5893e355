"""Chain digests of token ids that the host knows, advanced by the tokens that are new in a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, repeat
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
    """The chain over each request's computed tokens, in the order of the last batch."""

    def __init__(self, backend: Backend) -> None:
        """`backend` computes on the CPU."""
        self._backend = backend
        self._absent: dict[str, tuple[int, int]] = {}  # left the batch, may return: tokens, digest
        self._requests: list[str] = []  # of the last batch
        self._counts = np.zeros(0, dtype=np.int64)  # tokens in the digest
        self._digests = np.zeros(0, dtype=np.int64)
        self._result = torch.from_numpy(self._digests)

    def forget(self, requests: Iterable[str]) -> None:
        """These requests ended, or have other tokens from now on."""
        for request in requests:
            self._absent.pop(request, None)
            if request in self._requests:
                self._restart(self._requests.index(request))

    def advance(self, requests: list[str], tokens: _Ints, ends: _Ints) -> Tensor:
        """int64 [n] on the CPU, valid until the next call: chain over tokens[i, :ends[i]] of request i.

        tokens int32 [rows, width], ends int32 [n].
        """
        # Most batches are the last one with one more token for each: then there is no work per request.
        if requests != self._requests:
            self._set_batch(requests)
        extend_chains(self._backend, tokens, ends, self._counts, self._digests)
        return self._result

    def _restart(self, row: int) -> None:
        self._counts[row], self._digests[row] = 0, _ANCHOR

    def _set_batch(self, requests: list[str]) -> None:
        known, before = self._absent, zip(self._counts.tolist(), self._digests.tolist(), strict=True)
        # Those without tokens ended, or start again: nothing is to be kept of them.
        kept = self._counts > 0
        known.update(compress(zip(self._requests, before, strict=True), kept.tolist()))
        rows = list(map(known.pop, requests, repeat((0, _ANCHOR))))
        self._counts, self._digests = np.array(rows, dtype=np.int64).reshape(-1, 2).T.copy()
        self._requests, self._result = requests, torch.from_numpy(self._digests)
