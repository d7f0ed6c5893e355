"""The decode half of a disaggregated engine: receives computed prompts into its prefix cache and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from canary_obs.reference_engine.cache.radix_cache import Node, Tokens
from canary_obs.reference_engine.disaggregated.links import Link
from canary_obs.reference_engine.disaggregated.messages import Grant, Grants, Offer, Offers
from canary_obs.reference_engine.disaggregated.regions import Places, places
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
    seen: NDArray[np.int64]  # last slots of both that sliding windows will see; their window slots are held
    bare: NDArray[np.int64]  # of those, the ones whose window slots are to be filled

    @property
    def slots(self) -> NDArray[np.int64]:
        """All of them, by position; kept from eviction."""
        return np.concatenate([self.prefix, self.fresh])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """A request whose KV is here and which has not run yet: its prefix must not be evicted meanwhile."""

    request: Request
    node: Node  # locked
    slots: int
    seen: NDArray[np.int64]  # full slots whose window slots are held


@dataclass(slots=True, kw_only=True)
class _Source:
    """One engine that prefills."""

    links: tuple[Link, ...]
    receiver: KVReceiver
    closing: bool = False  # it has said that nothing will follow


class DecodeSide:
    """One rank. All ranks of the engine hear the same offers in the same order."""

    def __init__(self, engine: Engine, *sources: Sequence[Link]) -> None:
        """sources: of each engine that prefills, the links to its ranks."""
        self.engine = engine
        self._sources = [_Source(links=tuple(links), receiver=KVReceiver(engine, links)) for links in sources]
        self._arrived: list[_Arrived] = []

    @property
    def closing(self) -> bool:
        """Whether every prefill side has said that nothing will follow."""
        return all(source.closing for source in self._sources)

    def has_work(self) -> bool:
        """Whether something runs, or may still arrive."""
        return self.engine.has_work() or not self.closing

    def step(self) -> tuple[Request, ...]:
        """One exchange, then one forward if there is something to run; returns the requests that finished."""
        for source in self._sources:
            if not source.closing:
                self._exchange(source)
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

    def _exchange(self, source: _Source) -> None:
        heard = [link.receive_message(Offers) for link in source.links]
        if heard[0].closing:
            source.closing = True
            return
        landings: list[_Landing | None] = []
        for offer in heard[0].offers:
            landings.append(self._make_place(offer, [one for one in landings if one is not None]))
        answer = Grants(grants=[self._grant(landing) for landing in landings])
        for link in source.links:
            link.send_message(answer)
        for landing in landings:
            if landing is not None:
                source.receiver.receive(self._places(landing), landing.offer.metadata_kind)
                self._queue(landing)

    def _make_place(self, offer: Offer, others: Sequence[_Landing]) -> _Landing | None:
        scheduler = self.engine.scheduler
        kept = self._usable(offer)
        if not self._has_room(offer, others):
            return None
        prefix, node = scheduler.cache.match(self._keys(offer, kept))
        scheduler.cache.lock(node)
        fresh = scheduler.take((kept - prefix.size) // self.engine.config.page_size)
        if fresh is None:
            scheduler.cache.unlock(node)
            return None
        seen, bare = np.concatenate([prefix, fresh])[kept - self._seen(kept) :], _NONE
        if scheduler.windows is not None:
            given = scheduler.windows.hold(seen, scheduler.running)
            if given is None:
                scheduler.allocator.free(fresh)
                scheduler.cache.unlock(node)
                return None
            bare = given
        landing = _Landing(offer=offer, prefix=prefix, node=node, fresh=fresh, seen=seen, bare=bare)
        for numbering, slots in self._places(landing).items():
            self.engine.connector.reserved(
                numbering, torch.from_numpy(slots).to(self.engine.runner.pool.device)
            )
        return landing

    def _has_room(self, offer: Offer, others: Sequence[_Landing]) -> bool:
        """Whether the longest request still fits next to all that has not run yet and cannot be evicted."""
        config, waiting = self.engine.config, len(self.engine.unfinished) + len(others)
        held = sum(one.slots for one in self._arrived) + sum(one.slots.size for one in others)
        if waiting >= config.max_running or held + offer.cached + config.max_context + config.page_size > (
            config.num_slots
        ):
            return False
        if self.engine.scheduler.windows is None or not waiting:
            return True
        seen = sum(one.seen.size for one in self._arrived) + sum(one.seen.size for one in others)
        seen += self._seen(offer.cached)
        return seen + self.engine.scheduler.windows.slots.window + config.token_budget <= config.swa_slots

    def _seen(self, kept: int) -> int:
        """Of so many leading positions, how many the sliding windows of the next token see."""
        windows = self.engine.scheduler.windows
        return 0 if windows is None else min(kept, windows.slots.window - 1)

    def _usable(self, offer: Offer) -> int:
        """Leading positions, in whole pages, from which this engine could go on if it had their KV."""
        kept = offer.cached - offer.cached % self.engine.config.page_size
        if (windows := self.engine.scheduler.windows) is None:
            return kept
        own, _ = self.engine.scheduler.cache.match(self._keys(offer, kept))
        lacking = np.ones(kept, dtype=np.bool_)
        lacking[: own.size] = ~windows.slots.resident(own)
        return 0 if lacking[kept - self._seen(kept) : offer.window_from].any() else kept

    def _keys(self, offer: Offer, kept: int) -> Tokens:
        return self.engine.scheduler.keys(np.array(offer.tokens, dtype=np.int32), kept)

    def _places(self, landing: _Landing) -> Places:
        """Slots to be filled."""
        windows = self.engine.scheduler.windows
        windowed = _NONE if windows is None else windows.slots.of[landing.bare]
        return places(self.engine, landing.fresh, windowed)

    def _grant(self, landing: _Landing | None) -> Grant:
        if landing is None:
            return Grant()
        positions, windows = _NONE, self.engine.scheduler.windows
        if windows is not None:
            positions = np.flatnonzero(np.isin(landing.slots, landing.bare))
            assert np.array_equal(landing.slots[positions], landing.bare)
        return Grant(
            start=landing.prefix.size,
            slots=landing.fresh.tolist(),
            window_positions=positions.tolist(),
            window_slots=[] if windows is None else windows.slots.of[landing.bare].tolist(),
        )

    def _queue(self, landing: _Landing) -> None:
        """The KV goes to the prefix cache, where the request will find it when it is admitted."""
        offer, scheduler, slots = landing.offer, self.engine.scheduler, landing.slots
        tokens, keys = np.array(offer.tokens, dtype=np.int32), self._keys(offer, slots.size)
        held = scheduler.cache.insert(keys, slots)
        cached, node = scheduler.cache.match(keys)
        scheduler.cache.lock(node)
        scheduler.cache.unlock(landing.node)
        seen = cached[slots.size - landing.seen.size :]
        if scheduler.windows is not None:
            scheduler.windows.let_go(landing.seen)
            own = slice(landing.prefix.size, held)
            scheduler.windows.slots.move(slots[own], cached[own])
            given = scheduler.windows.hold(seen, scheduler.running)
            assert given is not None
            assert not given.size, "what was held before the transfer is there"
        # A request of the same exchange may have brought the same tokens: ours are spare.
        scheduler.allocator.free(slots[landing.prefix.size : held])
        request = self.engine.add_request(tokens[:-1], _sampling(offer), offer.id)
        if request.generator is not None:
            # The prefill side drew once, for the first token.
            torch.empty(self.engine.config.shape.vocab_size).exponential_(generator=request.generator)
        request.append(int(tokens[-1]))
        self._arrived.append(_Arrived(request=request, node=node, slots=slots.size, seen=seen))

    def _let_go(self) -> None:
        """A request that runs, or never will, needs no other lock on its prefix."""
        scheduler = self.engine.scheduler
        waiting = [one for one in self._arrived if one.request.status is Status.WAITING]
        for one in self._arrived:
            if one.request.status is not Status.WAITING:
                if scheduler.windows is not None:
                    scheduler.windows.let_go(one.seen)
                scheduler.cache.unlock(one.node)  # its slots may be freed now
        self._arrived = waiting


def _sampling(offer: Offer) -> Sampling:
    return Sampling(
        max_tokens=offer.max_tokens,
        temperature=offer.temperature,
        seed=offer.seed,
        stop_at_eos=offer.stop_at_eos,
    )


_NONE = np.empty(0, dtype=np.int64)
