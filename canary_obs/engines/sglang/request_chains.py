"""Chains over the scheduler's own token lists: what each request of a batch should have in its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains

_Longs = NDArray[np.int64]


class BatchChains(NamedTuple):
    """int64 [n] each, on the CPU, in the order of the batch."""

    digests: Tensor  # chain over the tokens before the forward
    known_lens: Tensor  # tokens that the scheduler knows, up to the end of the forward
    known_digests: Tensor  # chain over these


class RequestChains:
    """Follows SGLang's requests, each by its object: a request that has ended is forgotten with it."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[int, np.uint64]] = WeakKeyDictionary()

    def advance(self, requests: Sequence[Any], prefixes: _Longs, ends: _Longs) -> BatchChains:
        """`prefixes` and `ends`: tokens of each request before and after the forward, int64 [n] each.

        The newest token may be known on the device only. Raises LookupError when an earlier one is missing.
        """
        count = len(requests)
        starts, stops = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        before = np.empty(count, dtype=np.uint64)
        head, tail = list[int](), list[int]()
        for place, request in enumerate(requests):
            prompt, output = request.origin_input_ids, request.output_ids
            prefix, total = int(prefixes[place]), len(prompt) + len(output)
            if total < prefix:
                raise LookupError(
                    f"request {request.rid}: the forward continues after {prefix} tokens, of which the "
                    f"scheduler has {total}"
                )
            start, before[place] = self._known.get(request, (0, ANCHOR))
            if start > prefix:  # retracted: it is computed anew
                start, before[place] = 0, ANCHOR
            starts[place], stops[place] = start, min(int(ends[place]), total)
            head += _part(prompt, output, start, prefix)
            tail += _part(prompt, output, prefix, int(stops[place]))
        digests = added_chains(before, np.array(head, dtype=np.int32), starts, prefixes)
        known = added_chains(digests, np.array(tail, dtype=np.int32), prefixes, stops)
        for place, request in enumerate(requests):
            self._known[request] = int(stops[place]), known[place]
        return BatchChains(
            torch.from_numpy(digests.view(np.int64)),
            torch.from_numpy(stops),
            torch.from_numpy(known.view(np.int64)),
        )


def _part(prompt: Sequence[int], output: Sequence[int], start: int, stop: int) -> list[int]:
    """Tokens `start` to `stop` of a prompt and what follows it."""
    length = len(prompt)
    found = list(prompt[start:stop]) if start < length else []
    if stop > length:
        found += output[max(start - length, 0) : stop - length]
    return found
