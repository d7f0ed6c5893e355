"""The decode half of a disaggregated engine: receives computed prompts into its prefix cache and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from canary_obs.reference_engine.cache.radix_cache import Node
from canary_obs.reference_engine.disaggregated.links import Link
from canary_obs.reference_engine.disaggregated.messages import Grant, Grants, Offer, Offers
from canary_obs.reference_engine.disaggregated.transfer import KVReceiver
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Request, Sampling, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class _Landing:
    """An offer with a place for it."""

    offer: Offer
    prefix: NDArray[np.int64]  # slots that the prefix cache holds already
    node: Node  # locked end of that prefix
    fresh: NDArray[np.int64]  # slots for the rest

    @property
    def slots(self) -> int:
        """Slots that it keeps from eviction."""
        return self.prefix.size + self.fresh.size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """A request whose KV is here and which has not run yet: its prefix must not be evicted meanwhile."""

    request: Request
    node: Node  # locked
    slots: int


class DecodeSide:
    """One rank. All ranks of the engine hear the same offers in the same order."""

    def __init__(self, engine: Engine, links: Sequence[Link]) -> None:
        self.engine = engine
        self.closing = False  # the prefill side has said that nothing will follow
        self._links = tuple(links)
        self._receiver = KVReceiver(engine, links)
        self._arrived: list[_Arrived] = []

    def has_work(self) -> bool:
        """Whether something runs, or may still arrive."""
        return self.engine.has_work() or not self.closing

    def step(self) -> tuple[Request, ...]:
        """One exchange, then one forward if there is something to run; returns the requests that finished."""
        if not self.closing:
            self._exchange()
        finished: tuple[Request, ...] = ()
        if self.engine.has_work():
            finished = self.engine.step()
        else:
            self.engine.idle()
        self._let_go()
        return finished

    def abort(self, request_id: str) -> bool:
        """Drop a request that arrived. False = not here (any more)."""
        return self.engine.abort(request_id)

    def _exchange(self) -> None:
        heard = [link.receive_message(Offers) for link in self._links]
        if heard[0].closing:
            self.closing = True
            return
        landings: list[_Landing | None] = []
        for offer in heard[0].offers:
            landings.append(self._make_place(offer, [one for one in landings if one is not None]))
        answer = Grants(grants=[_grant(landing) for landing in landings])
        for link in self._links:
            link.send_message(answer)
        for landing in landings:
            if landing is not None:
                self._receiver.receive(landing.fresh, landing.offer.metadata_kind)
                self._queue(landing)

    def _make_place(self, offer: Offer, others: Sequence[_Landing]) -> _Landing | None:
        config, scheduler = self.engine.config, self.engine.scheduler
        # What has not run yet cannot be evicted: the longest request must still fit next to it.
        waiting = sum(one.slots for one in self._arrived) + sum(one.slots for one in others)
        needed = waiting + offer.cached + config.max_context + config.page_size
        if len(self.engine.unfinished) + len(others) >= config.max_running or needed > config.num_slots:
            return None
        kept = offer.cached - offer.cached % config.page_size
        prefix, node = scheduler.cache.match(np.array(offer.tokens[:kept], dtype=np.int32))
        scheduler.cache.lock(node)
        fresh = scheduler.take((kept - prefix.size) // config.page_size)
        if fresh is None:
            scheduler.cache.unlock(node)
            return None
        self.engine.connector.reserved(torch.from_numpy(fresh).to(self.engine.runner.pool.device))
        return _Landing(offer=offer, prefix=prefix, node=node, fresh=fresh)

    def _queue(self, landing: _Landing) -> None:
        """The KV goes to the prefix cache, where the request will find it when it is admitted."""
        offer, scheduler = landing.offer, self.engine.scheduler
        tokens = np.array(offer.tokens, dtype=np.int32)
        slots = np.concatenate([landing.prefix, landing.fresh])
        held = scheduler.cache.insert(tokens[: slots.size], slots)
        # A request of the same exchange may have brought the same tokens: ours are spare.
        scheduler.allocator.free(slots[landing.prefix.size : held])
        scheduler.cache.unlock(landing.node)
        _, node = scheduler.cache.match(tokens[: slots.size])
        scheduler.cache.lock(node)
        request = self.engine.add_request(tokens[:-1], _sampling(offer), offer.id)
        if request.generator is not None:
            # The prefill side drew once, for the first token.
            torch.empty(self.engine.config.shape.vocab_size).exponential_(generator=request.generator)
        request.append(int(tokens[-1]))
        self._arrived.append(_Arrived(request=request, node=node, slots=slots.size))

    def _let_go(self) -> None:
        """A request that runs, or never will, needs no other lock on its prefix."""
        waiting = [one for one in self._arrived if one.request.status is Status.WAITING]
        for one in self._arrived:
            if one.request.status is not Status.WAITING:
                self.engine.scheduler.cache.unlock(one.node)
        self._arrived = waiting


def _grant(landing: _Landing | None) -> Grant:
    return Grant() if landing is None else Grant(start=landing.prefix.size, slots=landing.fresh.tolist())


def _sampling(offer: Offer) -> Sampling:
    return Sampling(
        max_tokens=offer.max_tokens,
        temperature=offer.temperature,
        seed=offer.seed,
        stop_at_eos=offer.stop_at_eos,
    )
