"""Sends what the scheduler knows of each request's tokens with its outputs, as chain digests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import ge
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from canary_kernels.hashing import mix_arrays
from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains

TOKENS_ATTRIBUTE = "kv_canary_tokens"  # of SchedulerOutput: TokenChains.advance of its requests
CHAINS_ATTRIBUTE = "_kv_canary_chains"  # of Scheduler: its TokenChains


class _Decoding(NamedTuple):
    """A batch whose requests went on by one token each, if the next batch is the same again."""

    names: tuple[str, ...]
    stops: list[int]  # of the next batch, if it is
    chains: NDArray[np.uint64]  # up to the token before
    positions: NDArray[np.int64]  # of the last token of each chain

    def go_on(self, newest: list[int]) -> NDArray[np.int64]:
        """By these tokens; int64 [2, n] as TokenChains.advance returns it."""
        added = mix_arrays(np.array(newest, dtype=np.int32), self.positions + 1)
        # From here on nothing fails, which would leave the fields apart.
        self.positions[:] += 1
        self.chains[:] += added
        sent = np.empty((2, len(newest)), dtype=np.int64)
        np.add(self.positions, 1, out=sent[0])
        sent[1] = self.chains.view(np.int64)
        self.stops[:] = (sent[0] + 1).tolist()
        return sent


def _gone_on(stops: list[int], found: list[Any]) -> list[int] | None:
    """The newest known token of each request, if every one of them is known up to its stop and no further."""
    computed = [request.num_computed_tokens for request in found]
    try:
        newest = [request.all_token_ids[stop - 1] for request, stop in zip(found, stops, strict=True)]
    except IndexError:  # a token is not known yet
        return None
    if computed == stops:
        return newest
    # As with asynchronous scheduling, which counts tokens that are still to be sampled.
    if not all(map(ge, computed, stops)):
        return None
    known = [request.num_tokens for request in found]
    ahead = zip(computed, known, stops, strict=True)
    if known != stops and any(count != stop != there for count, there, stop in ahead):
        return None
    return newest


class TokenChains:
    """The chain over each request's first tokens, advanced by those that a forward adds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, np.uint64]] = {}  # by request: tokens, the chain over them
        self._decoding: _Decoding | None = None  # the last batch, which `_known` lags behind

    def forget(self, requests: Collection[str]) -> None:
        """These requests have ended."""
        if requests:
            self._leave_decoding()
            for request in requests:
                self._known.pop(request, None)

    def advance(self, requests: Mapping[str, Any], scheduled: Mapping[str, int]) -> NDArray[np.int64]:
        """int64 [2, n]: tokens known of each scheduled request, and the chain over them; -1 = unknown.

        Up to the end of the forward that was just scheduled, or to the newest token that is known.
        """
        names = tuple(scheduled)
        found = [requests[name] for name in names]
        last = self._decoding
        newest = _gone_on(last.stops, found) if last is not None and last.names == names else None
        if last is not None and newest is not None:
            return last.go_on(newest)
        stops = [min(request.num_computed_tokens, request.num_tokens) for request in found]
        self._leave_decoding()
        return self._advance(names, found, stops)

    def _advance(self, names: tuple[str, ...], found: list[Any], stops: list[int]) -> NDArray[np.int64]:
        known, ids, starts = self._known, list[int](), list[int]()
        before = np.empty(len(names), dtype=np.uint64)
        lens = stops.copy()
        for place, (name, request) in enumerate(zip(names, found, strict=True)):
            stop = stops[place]
            count, before[place] = known.get(name, (0, ANCHOR))
            if stop < count:  # preempted: it is computed anew
                count, before[place] = 0, ANCHOR
            if request.prompt_embeds is not None:  # its prompt has no tokens
                count, stop = 0, -1
                lens[place] = stop
            ids += request.all_token_ids[count:stop] if stop > count else ()
            starts.append(min(count, max(stop, 0)))
        ends = np.array(lens, dtype=np.int64)
        chains = added_chains(before, np.array(ids, dtype=np.int32), np.array(starts, dtype=np.int64), ends)
        known.update(zip(names, zip(lens, chains, strict=True), strict=True))
        if min(lens, default=-1) >= 0:
            self._decoding = _Decoding(names, [stop + 1 for stop in lens], chains, ends - 1)
        return np.stack((ends, chains.view(np.int64)))

    def _leave_decoding(self) -> None:
        last, self._decoding = self._decoding, None
        if last is not None:
            counts = [stop - 1 for stop in last.stops]
            self._known.update(zip(last.names, zip(counts, last.chains, strict=True), strict=True))


def send_tokens(scheduler: Any, output: Any) -> None:
    """Let the chains travel with an output to every worker, which compares them with what it has written."""
    chains: TokenChains | None = vars(scheduler).get(CHAINS_ATTRIBUTE)
    if chains is None:
        chains = TokenChains()
        setattr(scheduler, CHAINS_ATTRIBUTE, chains)
    chains.forget(output.finished_req_ids)
    setattr(output, TOKENS_ATTRIBUTE, chains.advance(scheduler.requests, output.num_scheduled_tokens))
