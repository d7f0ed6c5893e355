"""Continuous batching: who runs in the next forward, with how many tokens, in which slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from canary_obs.engines.reference.pool import PageAllocator
from canary_obs.engines.reference.radix_cache import RadixCache
from canary_obs.engines.reference.request import Request, Status
from canary_obs.engines.reference.settings import EngineConfig


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Totals since the engine started."""

    steps: int = 0
    requests_finished: int = 0
    tokens: int = 0  # put through the model
    tokens_generated: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0  # tree nodes
    evicted_slots: int = 0
    preemptions: int = 0
    aborts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One forward: requests, tokens of each, and which of them have just been admitted."""

    requests: tuple[Request, ...]
    extends: tuple[int, ...]
    admitted: tuple[Request, ...]  # their shared prefix is not in the slot table yet


class Scheduler:
    """Owns the queues, the allocator and the prefix cache."""

    def __init__(self, config: EngineConfig, statistics: Statistics) -> None:
        self.config = config
        self.statistics = statistics
        self.allocator = PageAllocator(config.num_slots, config.page_size)
        self.cache = RadixCache(config.num_slots, config.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest admission first
        self._rows = list(range(config.max_running - 1, -1, -1))

    def schedule(self) -> Plan:
        """The next forward: one token of every running request first, prompts with the rest of the budget."""
        chosen: list[Request] = []
        extends: list[int] = []
        budget = self.config.token_budget
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            later = len(self.running) - index - 1
            extend = min(request.remaining, budget - later)
            preempted |= self._make_room(request, extend)
            if request.status is not Status.RUNNING:
                break  # the youngest gave way to itself
            chosen.append(request)
            extends.append(extend)
            budget -= extend
            index += 1
        admitted: list[Request] = []
        # A preempted request must not be admitted again in the step that pushed it out.
        while budget > 0 and self.waiting and self._rows and not preempted:
            request = self.waiting[0]
            if not self._admit(request):
                break
            extend = min(request.remaining, budget)
            self._extend_slots(request, extend)
            admitted.append(request)
            chosen.append(request)
            extends.append(extend)
            budget -= extend
        return Plan(requests=tuple(chosen), extends=tuple(extends), admitted=tuple(admitted))

    def release(self, request: Request, status: Status) -> None:
        """Take a running request off its row; what it computed goes to the prefix cache."""
        page = self.config.page_size
        kept = request.computed - request.computed % page
        held = self.cache.insert(request.tokens[:kept], request.slots[:kept])
        # Between `shared` and `held` another request cached the same tokens first: ours are spare.
        self.allocator.free(request.slots[request.shared : held])
        self.allocator.free(request.slots[kept : request.allocated])
        if request.node is not None:
            self.cache.unlock(request.node)
        self.running.remove(request)
        self._rows.append(request.row)
        request.node, request.row = None, -1
        request.computed = request.allocated = request.shared = 0
        request.status = status

    def _make_room(self, request: Request, extend: int) -> bool:
        """Slots for `extend` more tokens, preempting the youngest while there are none. True = preempted."""
        preempted = False
        while not self._extend_slots(request, extend):
            youngest = self.running[-1]
            self.release(youngest, Status.WAITING)
            self.waiting.appendleft(youngest)
            self.statistics.preemptions += 1
            preempted = True
            if youngest is request:
                break
        return preempted

    def _extend_slots(self, request: Request, extend: int) -> bool:
        """Allocate what `extend` more tokens need, evicting from the cache. False = not enough slots."""
        page = self.config.page_size
        pages = -(-(request.computed + extend - request.allocated) // page)
        if pages <= 0:
            return True
        short = pages - self.allocator.free_pages
        if short > 0:
            if short * page > self.cache.evictable:
                return False
            for slots in self.cache.evict(short * page):
                self.allocator.free(slots)
                self.statistics.evictions += 1
                self.statistics.evicted_slots += slots.size
        fresh = self.allocator.allocate(pages)
        request.slots[request.allocated : request.allocated + fresh.size] = fresh
        request.allocated += fresh.size
        return True

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a row and its cached prefix, when its whole prompt can be held."""
        page = self.config.page_size
        # At least one token must go through the model: its logits are needed.
        slots, node = self.cache.match(request.tokens[: request.length - 1])
        self.cache.lock(node)
        needed = -(-(request.length - slots.size) // page) + len(self.running)
        if needed * page > self.allocator.free_pages * page + self.cache.evictable and self.running:
            self.cache.unlock(node)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.node, request.row, request.status = node, self._rows.pop(), Status.RUNNING
        request.slots[: slots.size] = slots
        request.shared = request.computed = request.allocated = slots.size
        self.statistics.prefix_hit_tokens += slots.size
        return True

    def live_slots(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Slots with content: computed positions of running requests and everything the cache holds."""
        own = [request.slots[request.shared : request.computed] for request in self.running]
        return np.concatenate([self.cache.held(), *own])
