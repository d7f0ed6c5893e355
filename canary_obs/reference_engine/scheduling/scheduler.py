"""Continuous batching: who runs in the next forward, with how many tokens, in which slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from canary_obs.reference_engine.cache.host_tier import HostTier
from canary_obs.reference_engine.cache.pool import PageAllocator
from canary_obs.reference_engine.cache.radix_cache import Node, RadixCache, Slots, Tokens
from canary_obs.reference_engine.cache.window_slots import HybridAllocator, WindowSlots
from canary_obs.reference_engine.scheduling.request import ALL, Request, Status
from canary_obs.reference_engine.scheduling.windows import SlidingWindows
from canary_obs.reference_engine.settings import EngineConfig


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Totals since the engine started."""

    steps: int = 0
    forwards: int = 0  # of the target, from the moment they are planned
    draft_forwards: int = 0
    requests_finished: int = 0
    tokens: int = 0  # put through the model
    tokens_generated: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0  # tree nodes
    evicted_slots: int = 0
    drafts: int = 0  # tokens proposed
    drafts_accepted: int = 0
    reloaded_slots: int = 0  # from the host tier
    preemptions: int = 0
    aborts: int = 0
    failures: int = 0  # requests ended with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One forward: requests, tokens of each, and which of them have just been admitted."""

    requests: tuple[Request, ...]
    extends: tuple[int, ...]
    admitted: tuple[Request, ...]  # their shared prefix is not in the slot table yet
    window_changes: tuple[Slots, Slots] | None  # full slots, and the window slots they have now (-1 = none)


class Scheduler:
    """Owns the queues, the allocator and the prefix cache."""

    def __init__(self, config: EngineConfig, statistics: Statistics) -> None:
        self.config = config
        self.statistics = statistics
        self.allocator = PageAllocator(config.num_slots, config.page_size)
        self.cache = RadixCache(config.num_slots, config.page_size)
        self._drafting = config.draft_layers > 0
        self.host_tier: HostTier | None = None
        self.windows: SlidingWindows | None = None
        if config.shape.window is not None:
            slots = WindowSlots(config.shape.window, config.num_slots, config.swa_slots)
            self.windows = SlidingWindows(slots, self.cache)
            self.allocator = HybridAllocator(config.num_slots, config.page_size, slots)
        self.cache.unused = self.allocator.free
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest admission first
        self._rows = list(range(config.max_running - 1, -1, -1))
        self.withdrawn_rows: set[int] = set()  # not given to requests

    def schedule(self) -> Plan:
        """The next forward: one token of every running request first, prompts with the rest of the budget."""
        chosen: list[Request] = []
        extends: list[int] = []
        budget = self.config.token_budget
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self.windows is not None:
                self.windows.slide(request)
            later = len(self.running) - index - 1
            extend = min(request.remaining + request.drafts, budget - later)
            if request.drafts and not self._extend_slots(request, extend):
                extend = min(request.remaining, extend)  # nobody gives way to a proposal
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
            if not self._admit(request, budget):
                break
            extend = min(request.remaining, budget)
            self._extend_slots(request, extend)
            admitted.append(request)
            chosen.append(request)
            extends.append(extend)
            budget -= extend
        return Plan(
            requests=tuple(chosen),
            extends=tuple(extends),
            admitted=tuple(admitted),
            window_changes=self.windows.slots.changes() if self.windows is not None else None,
        )

    def release(self, request: Request, status: Status) -> None:
        """Take a running request off its row; what it computed goes to the prefix cache."""
        page = self.config.page_size
        kept = min(request.computed, request.drafted) if self._drafting else request.computed
        kept = min(kept, request.cacheable)
        if request.node is not None and (attached := self.cache.attached(request.node)) < request.shared:
            kept = min(kept, attached)  # the rest went on from what was discarded
        kept -= kept % page
        held = self.cache.insert(self.keys(request.tokens, kept), request.slots[:kept])
        if self.windows is not None:
            self.windows.leave(request)
            cached, _ = self.cache.match(request.tokens[:held])
            self.windows.slots.move(request.slots[request.shared : held], cached[request.shared :])
        # Between `shared` and `held` another request cached the same tokens first: ours are spare.
        self.allocator.free(request.slots[request.shared : held])
        self.allocator.free(request.slots[max(kept, request.shared) : request.allocated])
        if request.node is not None:
            self.cache.unlock(request.node)
        self.running.remove(request)
        if request.row not in self.withdrawn_rows:
            self._rows.append(request.row)
        request.node, request.row, request.cacheable = None, -1, ALL
        request.computed = request.allocated = request.shared = request.drafted = request.drafts = 0
        request.status = status

    def preempt(self, request: Request) -> None:
        """A running request waits again, before all others."""
        self.release(request, Status.WAITING)
        self.waiting.appendleft(request)
        self.statistics.preemptions += 1

    def withdraw_row(self, row: int) -> None:
        """Give this row to no request any more; whoever has it keeps it."""
        self.withdrawn_rows.add(row)
        if row in self._rows:
            self._rows.remove(row)

    def restore_row(self, row: int) -> None:
        """Give a withdrawn row to requests again."""
        if row in self.withdrawn_rows:
            self.withdrawn_rows.remove(row)
            if all(request.row != row for request in self.running):
                self._rows.append(row)

    def _make_room(self, request: Request, extend: int) -> bool:
        """Slots for `extend` more tokens, preempting the youngest while there are none. True = preempted."""
        preempted = False
        while not self._extend_slots(request, extend):
            youngest = self.running[-1]
            self.preempt(youngest)
            preempted = True
            if youngest is request:
                break
        return preempted

    def _extend_slots(self, request: Request, extend: int) -> bool:
        """Allocate what `extend` more tokens need, evicting from the cache. False = not enough slots."""
        if not self._extend_full(request, extend):
            return False
        return self.windows is None or self.windows.extend(request, extend, self.running)

    def _extend_full(self, request: Request, extend: int) -> bool:
        page = self.config.page_size
        pages = -(-(request.computed + extend - request.allocated) // page)
        if pages <= 0:
            return True
        fresh = self.take(pages)
        if fresh is None:
            return False
        request.slots[request.allocated : request.allocated + fresh.size] = fresh
        request.allocated += fresh.size
        return True

    def take(self, pages: int) -> Slots | None:
        """Slots of fresh pages, evicting from the cache; None = not enough."""
        page = self.config.page_size
        short = pages - self.allocator.free_pages
        if short > 0:
            if short * page > self.cache.evictable:
                return None
            leaving = self._leaving if self.host_tier is not None else None
            for slots in self.cache.evict(short * page, leaving):
                self.allocator.free(slots)
                self.statistics.evictions += 1
                self.statistics.evicted_slots += slots.size
        return self.allocator.allocate(pages)

    def _admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request a row and its cached prefix, when its whole prompt can be held."""
        # At least one token must go through the model: its logits are needed.
        slots, node = self.match(self.keys(request.tokens, request.length - 1))
        self.cache.lock(node)
        if self.host_tier is not None:
            slots, node = self._reloaded(request, slots, node)
        if self.running and not self._has_room(request.length - slots.size, budget):
            self.cache.unlock(node)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.node, request.row, request.status = node, self._rows.pop(), Status.RUNNING
        request.slots[: slots.size] = slots
        request.shared = request.computed = request.allocated = request.drafted = slots.size
        if self.windows is not None:
            self.windows.enter(request)
        self.statistics.prefix_hit_tokens += slots.size
        return True

    def reserve_lookahead_slots(self, request: Request, tokens: int) -> bool:
        """Slots for this many tokens after the computed ones, evicting but not preempting. False = none."""
        return self._extend_full(request, tokens)

    def keys(self, tokens: Tokens, count: int) -> Tokens:
        """What the prefix cache knows the first `count` positions of these tokens by.

        With a draft model each token and the one after it: the draft KV of a position depends on both.
        """
        if not self._drafting:
            return tokens[:count]
        pairs = tokens[: count + 1].astype(np.int64)
        return pairs[:-1] << 32 | pairs[1:]

    def _leaving(self, node: Node) -> None:
        assert self.host_tier is not None
        self.host_tier.offload(self.cache.tokens_to(node), node.slots)

    def _reloaded(self, request: Request, slots: Slots, node: Node) -> tuple[Slots, Node]:
        """The locked match of a waiting request, lengthened by what the host tier holds and fits."""
        assert self.host_tier is not None
        wanted = request.tokens[: request.length - 1]
        room = self.allocator.free_pages + self.cache.evictable // self.config.page_size
        pages = self.host_tier.find(wanted, slots.size)[:room]
        fresh = self.take(len(pages)) if pages else None
        if fresh is None:
            return slots, node
        self.host_tier.load(pages, fresh)
        longer = np.concatenate([slots, fresh])
        self.cache.insert(wanted[: longer.size], longer)
        self.cache.unlock(node)
        slots, node = self.cache.match(wanted)
        self.cache.lock(node)
        self.statistics.reloaded_slots += fresh.size
        return slots, node

    def match(self, keys: Tokens) -> tuple[Slots, Node]:
        """The longest cached prefix that a request can go on from, and the node it ends at."""
        slots, node = self.cache.match(keys)
        if self.windows is not None:
            length = self.windows.slots.resumable(slots, self.config.page_size)
            if length < slots.size:
                slots, node = self.cache.match(keys[:length])
        return slots, node

    def _has_room(self, tokens: int, budget: int) -> bool:
        """Whether `tokens` more of a new request can be held, plus one for every running request."""
        page, running = self.config.page_size, len(self.running)
        needed = -(-tokens // page) + running
        if needed * page > self.allocator.free_pages * page + self.cache.evictable:
            return False
        if self.windows is None:
            return True
        needed = min(tokens, budget) + running + self.windows.slots.window - 1
        return needed <= self.windows.available(self.running)

    def live_slots(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Slots with content: what running requests have computed or use, and all that the cache holds."""
        own = [request.slots[request.shared : request.computed] for request in self.running]
        detached = np.flatnonzero(self.cache.detached)
        return np.concatenate([self.cache.held(), detached, *own])
