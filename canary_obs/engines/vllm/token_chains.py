"""Sends what the scheduler knows of each request's tokens with its outputs, as chain digests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, getitem, gt, itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from canary_kernels.checks import Backend
from canary_kernels.digest import extend_runs, one_by_one
from canary_obs.engine_api.launches import FEW_TOKENS
from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains, token_array
from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.scheduler_reports import log_fault
from canary_obs.runtime.device.backend import choose_backend

# Of SchedulerOutput: TokenChains.advance of its requests, or Later of it, in the process that made it.
TOKENS_ATTRIBUTE = "kv_canary_tokens"
CHAINS_ATTRIBUTE = "_kv_canary_chains"  # of Scheduler: its TokenChains
_NONE = np.empty((2, 0), dtype=np.int64)  # of an output without tokens
_UNKNOWN = 0, int(ANCHOR)  # tokens of a request that is new, the chain over them
_own_lists, _embeds_of = attrgetter("_all_token_ids"), attrgetter("prompt_embeds")
_computed_of = attrgetter("num_computed_tokens")
_SKIP_TO: Callable[..., None] = type(iter([])).__setstate__  # type: ignore[attr-defined] # of a list


class _Decoding:
    """A batch, if the next one is the same again and each of its requests goes on by one token."""

    # In each step of each request: no Python call, and as few passes over the requests as there can be.

    def __init__(
        self, backend: Backend, names: list[str], found: list[Any], tokens: list[Any], computed: list[int],
        chains: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """`found`: the requests; `tokens`, `computed`: theirs after it; `chains`: as `advance` returns."""
        self.names, self._found, self._tokens = names, found, tokens
        self._computed = computed  # as the next batch begins, for `_begin`
        self._backend, self._state = backend, chains.copy()
        self._newest: Iterator[tuple[int, ...]] | None = None  # token after each chain, batch by batch

    def is_of(self, requests: Mapping[str, Any], scheduled: Mapping[str, int]) -> bool:
        """Whether it is the batch of these requests, and each is still the same object."""
        return self.names == list(scheduled) and list(map(requests.get, self.names)) == self._found

    @property
    def chains(self) -> tuple[list[int], list[int]]:
        """The tokens in each chain, and the chains."""
        return self._state[0].tolist(), self._state[1].view(np.uint64).tolist()

    def go_on(self, computed: list[int]) -> NDArray[np.int64] | None:
        """As `advance` returns it; None = not each of them went on by one known token, so begin anew.

        `computed`: tokens of each request before this batch, which adds one to each.
        """
        if self._newest is None:
            self._begin()
        newest = next(self._newest, None) if self._newest is not None else None
        if newest is None:  # a token is not known yet
            return None
        # Each has a token more, so the sum shows whether one has two.
        if self._is_ahead and sum(map(len, self._tokens)) != self._known:
            return None
        self._known += len(newest)
        return self._state.copy() if self._extend(computed, newest) else None

    def _begin(self) -> None:
        tokens, counts = self._tokens, self._state[0].tolist()
        if set(map(type, tokens)) == {list}:
            self._known = sum(counts) + len(tokens)  # of all requests, after the next batch
            # With asynchronous scheduling, tokens that are still to be sampled count as computed.
            self._is_ahead = self._computed != counts
            ahead = np.array(self._computed, dtype=np.int64) - self._state[0]
            self._extend = one_by_one(self._backend, self._state, ahead)
            # What is appended before an iterator has reached the end is still to come.
            following = list(map(iter, tokens))
            deque(map(_SKIP_TO, following, counts), maxlen=0)
            self._newest = zip(*following, strict=False)


def _lists_of(requests: Sequence[Any]) -> list[Any]:
    """The lists that vLLM appends tokens to: each look into `all_token_ids` is a Python call."""
    try:
        return list(map(_own_lists, requests))
    except AttributeError:
        return [request.all_token_ids for request in requests]


class TokenChains:
    """The chain over each request's first tokens, advanced by those that a forward adds."""

    def __init__(self) -> None:
        self._backend = choose_backend("auto", torch.device("cpu"))
        self._known: dict[str, tuple[int, int]] = {}  # by request: tokens, the chain over them
        self._decoding: _Decoding | None = None  # the last batch, which `_known` lags behind
        # First tokens of requests that wait for a load: of the last output, and of the one before.
        self._announced: dict[str, Later[bytes]] = {}
        self._due: dict[str, Later[bytes]] = {}
        # Of the last output; all else lags behind until it is there.
        self._later: Later[NDArray[np.int64]] | None = None

    def expect(self, request: str, tokens: Later[bytes]) -> None:
        """A connector loads these first tokens, int32, of a request with the output that is being made.

        Their chain is computed with the next one, while they are on their way.
        """
        self._announced[request] = tokens

    def forget(self, requests: Collection[str]) -> None:
        """These requests have ended."""
        self.settle()
        if requests:
            self._leave_decoding()
            for request in requests:
                self._known.pop(request, None)
                self._announced.pop(request, None)
                self._due.pop(request, None)

    def advance(
        self, requests: Mapping[str, Any], scheduled: Mapping[str, int], computed: list[int] | None = None
    ) -> NDArray[np.int64]:
        """int64 [2, n]: tokens known of each scheduled request, and the chain over them; -1 = unknown.

        Up to the end of the forward that was just scheduled, or to the newest token that is known.
        `computed`: tokens of each before it, given only where the forward adds one to each.
        """
        if self._later is not None:
            self.settle()
        if self._due or self._announced:
            self._add_loaded()
        if not scheduled:  # while a request waits for its load, one output follows the other
            self._leave_decoding()
            return _NONE
        last = self._decoding
        if last is not None and computed is not None and last.is_of(requests, scheduled):
            self._decoding = None  # if this fails, `_known` lags behind and is right
            sent = last.go_on(computed)
            self._decoding = last
            if sent is not None:
                return sent
        return self._prepare(requests, scheduled)()

    def advance_later(
        self, requests: Mapping[str, Any], scheduled: Mapping[str, int], failed: Callable[[Exception], None]
    ) -> Later[NDArray[np.int64]]:
        """`advance`, from the tokens of each request as they are counted now, when the result is asked for.

        `failed` is called instead of raising; then nothing is known of this output.
        """
        self.settle()
        if self._due or self._announced:
            self._add_loaded()
        prepared = self._prepare(requests, scheduled)

        def compute() -> NDArray[np.int64] | None:
            self._later = None
            try:
                return prepared()
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler, or its worker, must go on
                failed(error)
                return None

        self._later = Later(compute)
        return self._later

    def settle(self) -> None:
        """Compute what is still to be computed."""
        if self._later is not None:
            self._later.get()

    def _add_loaded(self) -> None:
        due, self._due, self._announced = self._due, self._announced, {}
        for name, later in due.items():
            if (given := later.get()) is None:  # the whole chain is computed when it is scheduled
                continue
            tokens = np.frombuffer(given, dtype=np.int32)
            ends = np.array([0]), np.array([tokens.size])
            (after,) = added_chains(np.array([ANCHOR]), tokens, *ends)
            self._known[name] = tokens.size, int(after)

    def _prepare(
        self, requests: Mapping[str, Any], scheduled: Mapping[str, int]
    ) -> Callable[[], NDArray[np.int64]]:
        # In mixed traffic nearly every batch changes: no Python call, and no loop, for each of its requests.
        self._leave_decoding()
        names = list(scheduled)
        found = list(map(requests.__getitem__, names))
        computed, tokens = list(map(_computed_of, found)), _lists_of(found)
        lens = list(map(len, tokens))
        if any(map(gt, lens, computed)):
            lens = list(map(min, computed, lens))
        return partial(self._advance, names, found, tokens, computed, lens)

    def _advance(
        self, names: list[str], found: list[Any], tokens: list[Any], computed: list[int], lens: list[int]
    ) -> NDArray[np.int64]:
        known = list(map(self._known.get, names, repeat(_UNKNOWN)))
        counts, before = list(map(itemgetter(0), known)), list(map(itemgetter(1), known))
        embeds = list(map(_embeds_of, found))
        if embeds.count(None) < len(embeds):
            for place in np.flatnonzero([each is not None for each in embeds]).tolist():
                counts[place], lens[place], tokens[place] = 0, -1, ()  # its prompt has no tokens
        if any(map(gt, counts, lens)):
            for place, length in enumerate(lens):
                if counts[place] > length >= 0:  # preempted: computed anew
                    counts[place], before[place] = _UNKNOWN
        starts = np.array(counts, dtype=np.int64)
        sent = np.empty((2, len(names)), dtype=np.int64)
        sent[0], sent[1].view(np.uint64)[:] = lens, before
        ids: list[Any]
        if (sent[0] - starts == 1).all():
            ids = list(map(getitem, tokens, counts))
        else:
            ids = list(chain.from_iterable(map(getitem, tokens, map(slice, counts, lens))))
        extend_runs(self._backend, token_array(ids), starts, sent[0], sent[1])
        if min(lens, default=-1) >= 0:
            self._decoding = _Decoding(self._backend, names, found, tokens, computed, sent)
        else:
            chains = sent[1].view(np.uint64).tolist()
            self._known.update(zip(names, zip(lens, chains, strict=True), strict=True))
        return sent

    def _leave_decoding(self) -> None:
        last, self._decoding = self._decoding, None
        if last is not None:
            counts, chains = last.chains
            self._known.update(zip(last.names, zip(counts, chains, strict=True), strict=True))


def chains_of(scheduler: Any) -> TokenChains:
    """Those of a scheduler, which has them from the first call on."""
    chains: TokenChains | None = vars(scheduler).get(CHAINS_ATTRIBUTE)
    if chains is None:
        chains = TokenChains()
        setattr(scheduler, CHAINS_ATTRIBUTE, chains)
    return chains


def send_tokens(scheduler: Any, output: Any) -> None:
    """Let the chains travel with an output to every worker, which compares them with what it has written."""
    chains = scheduler.__dict__.get(CHAINS_ATTRIBUTE) or chains_of(scheduler)
    if output.finished_req_ids:
        chains.forget(output.finished_req_ids)
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    total, count = output.total_num_scheduled_tokens, len(scheduled)
    if total > FEW_TOKENS * count:  # a prompt, as a rule
        failed = partial(log_fault, scheduler, send_tokens.__name__)
        later = chains.advance_later(scheduler.requests, scheduled, failed)
        output.__dict__[TOKENS_ATTRIBUTE] = later
        return
    one_each = total == count and cached.req_ids == list(scheduled)
    computed = cached.num_computed_tokens if one_each else None
    output.__dict__[TOKENS_ATTRIBUTE] = chains.advance(scheduler.requests, scheduled, computed)
