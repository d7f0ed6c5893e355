"""Sends what the scheduler knows of each request's tokens with its outputs, as chain digests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains

TOKENS_ATTRIBUTE = "kv_canary_tokens"  # of SchedulerOutput: TokenChains.advance of its requests
CHAINS_ATTRIBUTE = "_kv_canary_chains"  # of Scheduler: its TokenChains
log = logging.getLogger("canary_obs")


class TokenChains:
    """The chain over each request's first tokens, advanced by those that a forward adds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, np.uint64]] = {}  # by request: tokens, the chain over them
        self.failed = False  # which was logged

    def forget(self, requests: Any) -> None:
        """These requests have ended."""
        for request in requests:
            self._known.pop(request, None)

    def advance(self, requests: Mapping[str, Any], scheduled: Mapping[str, int]) -> NDArray[np.int64]:
        """int64 [2, n]: tokens known of each scheduled request, and the chain over them; -1 = unknown.

        Up to the end of the forward that was just scheduled, or to the newest token that is known.
        """
        known, ids = self._known, list[int]()
        lens, starts = list[int](), list[int]()
        before = np.empty(len(scheduled), dtype=np.uint64)
        for place, name in enumerate(scheduled):
            request = requests[name]
            count, before[place] = known.get(name, (0, ANCHOR))
            stop = min(request.num_computed_tokens, request.num_tokens)
            if stop < count:  # preempted: it is computed anew
                count, before[place] = 0, ANCHOR
            if request.prompt_embeds is not None:  # its prompt has no tokens
                count, stop = 0, -1
            ids += request.all_token_ids[count:stop] if stop > count else ()
            lens.append(stop)
            starts.append(min(count, max(stop, 0)))
        first, stops = np.array(starts, dtype=np.int64), np.array(lens, dtype=np.int64)
        chains = added_chains(before, np.array(ids, dtype=np.int32), first, stops)
        known.update(zip(scheduled, zip(lens, chains, strict=True), strict=True))
        return np.stack((stops, chains.view(np.int64)))


def send_tokens(scheduler: Any, output: Any) -> None:
    """Let the chains travel with an output to every worker, which compares them with what it has written."""
    chains: TokenChains | None = vars(scheduler).get(CHAINS_ATTRIBUTE)
    if chains is None:
        chains = TokenChains()
        setattr(scheduler, CHAINS_ATTRIBUTE, chains)
    try:
        chains.forget(output.finished_req_ids)
        setattr(output, TOKENS_ATTRIBUTE, chains.advance(scheduler.requests, output.num_scheduled_tokens))
    except Exception:  # the workers notice that there is nothing to compare with
        if not chains.failed:
            chains.failed = True
            log.exception("canary_obs: the scheduler's tokens cannot be compared with the workers'")
