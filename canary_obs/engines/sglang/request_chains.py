"""Chains over the scheduler's own token lists: what each request of a batch should have in its slots."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.hashing import mix_arrays
from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains, token_array

_Longs = NDArray[np.int64]
_MOST_FOLLOWING = 16  # batches whose tokens are added at once: a step pays for all of them


class BatchChains(NamedTuple):
    """int64 [n] each, in the order of the batch."""

    digests: _Longs  # chain over the tokens before the forward
    known_lens: _Longs  # tokens that the scheduler knows, up to the end of the forward
    known_digests: _Longs  # chain over these

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three, on the CPU, in the same memory."""
        return (
            torch.from_numpy(self.digests), torch.from_numpy(self.known_lens),
            torch.from_numpy(self.known_digests),
        )  # fmt: skip


class _LastBatch(NamedTuple):
    """The requests of a batch, and of each, what is known: arrays [n]."""

    requests: list[Any]
    stops: _Longs  # tokens in the chain
    known: NDArray[np.uint64]


class _Following:
    """The batch that most likely follows one in which each request got one token: one token on."""

    def __init__(self, prefixes: _Longs, ends: _Longs, lengths: _Longs, *, late: bool) -> None:
        """Of the batch before it: tokens before and after it, and of the answers so far. Arrays [n]."""
        self.extends: list[int] = (ends - prefixes).tolist()
        self.decodes = self.extends == [1] * len(self.extends)
        self.late = late  # whether the token of the forward is known on the device only
        # Lists of a batch's size are compared sooner than arrays.
        self.ends: list[int] = (ends + 1).tolist()
        self.lengths: list[int] = (lengths + 1).tolist()
        self.tokens = list[list[int]]()  # of the batches that followed, not in the chains yet

    def takes(self, outputs: list[Any], ends: list[int]) -> bool:
        """Whether this is it: then the next one is expected, and the tokens are kept."""
        if list(map(len, outputs)) != self.lengths or ends != self.ends:
            return False
        self.ends = [end + 1 for end in ends]
        self.lengths = [length + 1 for length in self.lengths]
        self.tokens.append([output[-1] for output in outputs])
        return True


class RequestChains:
    """Follows SGLang's requests, each by its object: one that has ended is forgotten after the next batch."""

    def __init__(self, first: int = 0) -> None:
        """`first`: the token of slot 0; 1 for a draft model, whose slots hold the token that follows."""
        self._first = first
        self._known: WeakKeyDictionary[Any, tuple[int, np.uint64]] = WeakKeyDictionary()
        self._last: _LastBatch | None = None  # not in `_known` yet
        self._following: _Following | None = None

    def advance(self, requests: Sequence[Any], prefixes: _Longs, ends: _Longs) -> BatchChains:
        """`prefixes` and `ends`: tokens of each request before and after the forward, int64 [n] each.

        The newest token may be known on the device only. Raises LookupError when an earlier one is missing.
        """
        if (found := self._followed(requests, prefixes, ends)) is not None:
            return found
        self._add_following()
        if (found := self._decoded(requests, prefixes, ends)) is not None:
            return found
        self._keep_last()
        count = len(requests)
        # Two runs of tokens for each request, laid end to end: up to its prefix, and from there on.
        starts, stops = np.empty(2 * count, dtype=np.int64), np.empty(2 * count, dtype=np.int64)
        starts[count:] = stops[:count] = prefixes
        chains = np.zeros(2 * count, dtype=np.uint64)
        head, tail = array("q"), array("q")
        for place, request in enumerate(requests):
            prompt, output = request.origin_input_ids, request.output_ids
            prefix, total = int(prefixes[place]), len(prompt) + len(output) - self._first
            if total < prefix:
                raise LookupError(
                    f"request {request.rid}: the forward continues after {prefix} tokens, of which the "
                    f"scheduler has {total}"
                )
            start, before = self._known.get(request, (0, ANCHOR))
            if start > prefix:  # retracted: it is computed anew
                start, before = 0, ANCHOR
            starts[place], chains[place] = start, before
            stops[count + place] = stop = min(int(ends[place]), total)
            self._add_part(head, prompt, output, start, prefix)
            self._add_part(tail, prompt, output, prefix, stop)
        head.extend(tail)
        added = added_chains(chains, token_array(head), starts, stops)
        digests, stops = added[:count], stops[count:]
        known = digests + added[count:]
        self._last = _LastBatch(list(requests), stops, known)
        return _chains(digests, stops, known)

    def known(self, requests: Sequence[Any]) -> BatchChains:
        """Of all that the scheduler knows, whatever of it the forward adds; the digests are over the same."""
        totals = _lengths_of([request.origin_input_ids for request in requests])
        totals += _lengths_of([request.output_ids for request in requests]) - self._first
        self._add_following()
        last, self._following = self._last, None
        if last is None or last.requests != requests or (totals < last.stops).any():
            return self.advance(requests, totals, totals)
        new = array("q")
        for request, start, stop in zip(requests, last.stops.tolist(), totals.tolist(), strict=True):
            self._add_part(new, request.origin_input_ids, request.output_ids, start, stop)
        known = added_chains(last.known, token_array(new), last.stops, totals)
        self._last = _LastBatch(last.requests, totals, known)
        return _chains(known, totals, known)

    def next_tokens(self, requests: Sequence[Any], ends: list[int]) -> list[int] | None:
        """The newest token of each request, for a batch that is the last one, one token on.

        The chains over what is known are then those of the last batch and these tokens. `ends`: tokens after
        the forward, which adds one. None = it is not that batch; `advance` takes it.
        """
        following = self._following
        if following is None or not following.decodes or not self._takes(requests, ends):
            return None
        tokens = following.tokens[-1]
        if len(following.tokens) == _MOST_FOLLOWING:
            self._add_following()
        return tokens

    @property
    def late(self) -> bool:
        """Of `next_tokens`: whether the forward is given a token that follows them."""
        return self._following is not None and self._following.late

    def _takes(self, requests: Sequence[Any], ends: list[int]) -> bool:
        last, following = self._last, self._following
        if last is None or following is None or last.requests != requests:
            return False
        return following.takes([request.output_ids for request in requests], ends)

    def _followed(self, requests: Sequence[Any], prefixes: _Longs, ends: _Longs) -> BatchChains | None:
        """`_decoded` for a batch that is the last one, one token on: nearly each step, in half the time."""
        following = self._following
        if (
            following is None
            or (ends - prefixes).tolist() != following.extends
            or not self._takes(requests, ends.tolist())
        ):
            return None
        before = self._add_following()
        assert self._last is not None
        _, stops, known = self._last
        return _chains(known if following.late else before, stops, known)

    def _add_following(self) -> NDArray[np.uint64]:
        """Add the tokens of batches that followed to the chains; returns those before the newest one."""
        last, following = self._last, self._following
        if last is None or following is None or not following.tokens:
            return np.empty(0, dtype=np.uint64)
        tokens, following.tokens = np.array(following.tokens, dtype=np.int64), []
        count = tokens.shape[0]
        mixed = mix_arrays(tokens, last.stops + np.arange(count)[:, None])
        before: NDArray[np.uint64] = last.known + mixed[:-1].sum(axis=0)
        self._last = _LastBatch(last.requests, last.stops + count, before + mixed[-1])
        return before

    def _decoded(self, requests: Sequence[Any], prefixes: _Longs, ends: _Longs) -> BatchChains | None:
        """`advance` for the requests of the last batch, of which at most one token is new for each.

        None = it is not one.
        """
        last = self._last
        if last is None or last.requests != requests:
            return None
        outputs = [request.output_ids for request in requests]
        lengths = _lengths_of(outputs)
        prompts = _lengths_of([request.origin_input_ids for request in requests]) - self._first
        totals = prompts + lengths
        stops = np.minimum(ends, totals)
        heads, tails = prefixes - last.stops, stops - prefixes
        head, tail = int(heads[0]), int(tails[0])
        if (head, tail) not in ((0, 1), (1, 0), (0, 0), (1, 1)) or not (
            (heads == head) & (tails == tail) & (last.stops >= prompts)
        ).all():
            return None
        digests = known = last.known
        places = (last.stops - prompts).tolist()
        if head:
            new = [output[place] for output, place in zip(outputs, places, strict=True)]
            digests = known = digests + mix_arrays(np.array(new, dtype=np.int32), last.stops)
        if tail:
            new = [output[place + head] for output, place in zip(outputs, places, strict=True)]
            known = digests + mix_arrays(np.array(new, dtype=np.int32), prefixes)
        self._following = None
        if head + tail == 1 and (stops == totals).all():
            self._following = _Following(prefixes, ends, lengths, late=not tail)
        self._last = _LastBatch(last.requests, stops, known)
        return _chains(digests, stops, known)

    def _add_part(
        self, tokens: array[int], prompt: Sequence[int], output: Sequence[int], start: int, stop: int
    ) -> None:
        """Add what slots `start` to `stop` hold of a prompt and an output; SGLang's are arrays."""
        start, stop, length = start + self._first, stop + self._first, len(prompt)
        if start < length:
            tokens.extend(prompt[start:stop])
        if stop > length:
            tokens.extend(output[max(start - length, 0) : stop - length])

    def _keep_last(self) -> None:
        if self._last is not None:
            columns = zip(self._last.requests, self._last.stops.tolist(), self._last.known, strict=True)
            for request, stop, known in columns:
                self._known[request] = stop, known
            self._last = self._following = None


def _lengths_of(lists: Sequence[Sequence[int]]) -> _Longs:
    return np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))


def _chains(digests: NDArray[np.uint64], lens: _Longs, known: NDArray[np.uint64]) -> BatchChains:
    return BatchChains(digests.view(np.int64), lens, known.view(np.int64))
