"""The prefill half of a disaggregated engine: computes prompts, holds their KV, hands it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from canary_obs.reference_engine.cache.radix_cache import Node
from canary_obs.reference_engine.disaggregated.links import Link
from canary_obs.reference_engine.disaggregated.messages import Grant, Grants, Offer, Offers
from canary_obs.reference_engine.disaggregated.regions import Places, places
from canary_obs.reference_engine.disaggregated.transfer import KVSender
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Request, Sampling, Status
from canary_obs.reference_engine.settings import EngineConfig
from canary_obs.reference_engine.tokenizer import EOS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A computed prompt that waits to be taken."""

    offer: Offer
    slots: NDArray[np.int64]  # [offer.cached]
    node: Node  # locked
    windowed: NDArray[np.int64]  # last of the slots; their window slots are held


class PrefillSide:
    """One rank. All ranks of the engine are given the same requests in the same order."""

    def __init__(self, engine: Engine, links: Sequence[Link], sender: KVSender | None = None) -> None:
        self.engine = engine
        self._links = tuple(links)
        self._sender = KVSender(engine, links) if sender is None else sender
        self._wanted: dict[str, Sampling] = {}
        self._held: list[_Held] = []

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self.engine.config

    def add_request(
        self, prompt: NDArray[np.int32], sampling: Sampling, request_id: str | None = None
    ) -> Request:
        """Queue a prompt; the tokens after the first come from the decode side. Raises as Engine does."""
        # Draft KV is computed after the first token, from it: until then the request must run.
        once = replace(sampling, max_tokens=min(sampling.max_tokens, 1 + (self.engine.drafter is not None)))
        total = len(prompt) + sampling.max_tokens
        if total > self.engine.config.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens with max_tokens={sampling.max_tokens}: together at most "
                f"max_context={self.engine.config.max_context}; shorten one or enlarge it"
            )
        request = self.engine.add_request(prompt, once, request_id)
        self._wanted[request.id] = sampling
        return request

    def abort(self, request_id: str) -> bool:
        """Drop a request that has not been handed over. False = not here (any more)."""
        self._wanted.pop(request_id, None)
        for one in self._held:
            if one.offer.id == request_id:
                self._held.remove(one)
                self._let_go(one)
                return True
        return self.engine.abort(request_id)

    def has_work(self) -> bool:
        """Whether something is to be computed or handed over."""
        return self.engine.has_work() or bool(self._held)

    def step(self) -> tuple[Request, ...]:
        """One forward if there is room, then one exchange; returns requests that ended here."""
        ended = []
        if not self.engine.has_work() or not self._has_room():
            self.engine.idle()
        else:
            for request in (*self.engine.step(), *self._computed()):
                sampling = self._wanted.pop(request.id)
                if self._goes_on(request, sampling):
                    self._hold(request, sampling)
                else:
                    ended.append(request)
        self._exchange()
        return tuple(ended)

    def close(self) -> None:
        """Announce to the decode side that nothing will follow."""
        for link in self._links:
            link.send_message(Offers(offers=[], closing=True))

    def _has_room(self) -> bool:
        # What is held cannot be evicted: the longest request must still fit next to it.
        config = self.engine.config
        held = sum(one.slots.size for one in self._held)
        if held + config.max_context + config.page_size > config.num_slots:
            return False
        if (windows := self.engine.scheduler.windows) is None:
            return True
        held = sum(one.windowed.size for one in self._held)
        return held + windows.slots.window + config.token_budget <= config.swa_slots

    def _computed(self) -> list[Request]:
        """Requests that run on though their prompt is computed."""
        computed = [request for request in self.engine.unfinished if request.output.size]
        for request in computed:
            self.engine.finish(request)
        return computed

    def _goes_on(self, request: Request, sampling: Sampling) -> bool:
        if request.status is not Status.FINISHED:
            return False
        stopped = sampling.stop_at_eos and int(request.output[-1]) == EOS
        return not stopped and sampling.max_tokens > 1

    def _hold(self, request: Request, sampling: Sampling) -> None:
        scheduler = self.engine.scheduler
        slots, node = scheduler.match(scheduler.keys(request.tokens, request.prompt_length))
        scheduler.cache.lock(node)
        windowed = slots[slots.size :]
        if (windows := scheduler.windows) is not None:
            # More than one window, as the other engine may keep fewer tokens: its pages have another size.
            windowed = windows.resident_end(slots)[-2 * windows.slots.window :]
            windows.hold(windowed, scheduler.running)
        offer = Offer(
            id=request.id,
            tokens=request.tokens[: request.length].tolist(),
            cached=slots.size,
            window_from=slots.size - windowed.size,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_at_eos=sampling.stop_at_eos,
            metadata_kind=self.engine.connector.kind(),
        )
        self._held.append(_Held(offer=offer, slots=slots, node=node, windowed=windowed))

    def _let_go(self, one: _Held) -> None:
        scheduler = self.engine.scheduler
        scheduler.cache.unlock(one.node)
        if scheduler.windows is not None:
            scheduler.windows.let_go(one.windowed)

    def _source(self, one: _Held, grant: Grant, count: int) -> Places:
        """Slots of what was granted: `count` positions in the full layers."""
        windows, positions = self.engine.scheduler.windows, np.array(grant.window_positions, dtype=np.int64)
        windowed = positions if windows is None else windows.slots.of[one.slots[positions]]
        return places(self.engine, one.slots[grant.start : grant.start + count], windowed)

    def _exchange(self) -> None:
        for link in self._links:
            link.send_message(Offers(offers=[one.offer for one in self._held]))
        answers = [link.receive_message(Grants).grants for link in self._links]
        kept = []
        for one, *grants in zip(self._held, *answers, strict=True):
            first = grants[0]
            if first.slots is None:
                kept.append(one)
                continue
            targets = [self._target(grant) for grant in grants]
            self._sender.send(self._source(one, first, len(first.slots)), targets)
            self._let_go(one)
        self._held = kept

    def _target(self, grant: Grant) -> Places:
        full, windowed = (
            np.array(slots or (), dtype=np.int64) for slots in (grant.slots, grant.window_slots)
        )
        return places(self.engine, full, windowed)
