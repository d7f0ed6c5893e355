"""What healing can do to the reference engine's blocks and requests, between its steps."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from canary_obs.engines.reference.heal_groups import HealGroup, Place, RequestBlocks
from canary_obs.engines.reference.page_keys import PageKeys, hasher
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import QuarantineRefused
from canary_obs.healing.damage import Damage
from canary_obs.healing.lineage import Lineage
from canary_obs.healing.plan import Block, HeldRequest
from canary_obs.reference_engine.cache.host_tier import KEY_BYTES
from canary_obs.reference_engine.cache.radix_cache import NEVER, Slots, Tokens
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Request, Status
from canary_obs.slot_facts import request_name

_REMEMBERED = 512  # requests that have ended


class ReferenceActions:
    """Actor of one engine. A key stands for the tokens of a prefix in whole pages, as in the host tier.

    The page of the pool is the block of a key; the host tier's pages are blocks of a group of their own,
    numbered by their keys.
    """

    def __init__(self, engine: Engine, groups: Mapping[str, HealGroup]) -> None:
        self._engine, self._groups = engine, tuple(groups.values())
        self._cache, self._tier = engine.scheduler.cache, engine.scheduler.host_tier
        self.key_tokens = engine.config.page_size
        self.given_out = engine.statistics.forwards
        self.damage: Damage | None = None  # that is acted upon
        self._blocks = RequestBlocks(engine, groups)
        self._block_tokens = [group.block_tokens for group in self._groups]
        self._keys = PageKeys(self.key_tokens)
        self._key_of: dict[int, bytes] = {}  # by page that was cached
        self._page_of: dict[bytes, int] = {}
        self.since: dict[int, int] = {}  # by serial of a running request: its first forward
        self._restarts: Counter[int] = Counter()  # by serial
        self._finished: OrderedDict[str, Tokens] = OrderedDict()
        self._out: Counter[tuple[Place, int]] = Counter()
        self.lineage = Lineage(self.is_cached)

    @property
    def pool_blocks(self) -> int:
        """Pages of the pool and of the host tier."""
        held = self._engine.scheduler.allocator.num_pages
        return held + (self._tier.capacity if self._tier is not None else 0)

    @property
    def copies_elsewhere(self) -> str | None:
        """None: the host tier's copies are taken back, too."""
        return None

    # The view --------------------------------------------------------------------------------------

    def requests(self) -> Iterator[HeldRequest]:
        """Running requests, and those that wait again: they hold nothing."""
        for request in self._engine.scheduler.running:
            keys = self._keys.of(request, self._prefix(request))
            self.lineage.follow(keys, len(keys))  # they may be cached when it ends
            yield HeldRequest(
                request=request.id, name=request_name(request.id), blocks=self._blocks.of(request),
                keys=keys, block_tokens=self._block_tokens,
                computed=request.computed, since=self.since.get(request.serial, 0), joined=request.shared,
                sent=len(request.output), restartable=True, restarts=self._restarts[request.serial],
            )  # fmt: skip
        for request in self._engine.scheduler.waiting:
            if request.output.size:
                yield HeldRequest(
                    request=request.id, name=request_name(request.id), blocks=[[] for _ in self._groups],
                    keys=(), block_tokens=self._block_tokens, computed=0, since=0, joined=0,
                    sent=len(request.output), restartable=False, restarts=0,
                )  # fmt: skip

    def finished_keys(self, name: str) -> Sequence[bytes]:
        """Of the last requests that have ended."""
        if (tokens := self._finished.get(name)) is None:
            return ()
        keys = self._keys.list_of(tokens)
        self.lineage.follow(keys, len(keys))
        return keys

    def keys_of(self, block: Block) -> list[bytes]:
        """The key of the cached page that the block belongs to; of a copy in the host tier, its own."""
        if block[0] >= len(self._groups):
            return [block[1].to_bytes(KEY_BYTES)]
        place, number = self._place(block)
        if place is Place.WINDOW and self._engine.scheduler.windows is not None:
            owner = int(self._engine.scheduler.windows.slots.owner[number])
            place, number = Place.PAGE, owner // self.key_tokens
        if place is not Place.PAGE or number < 0:
            return []
        key = self._key_of.get(number)
        return [key] if key is not None and self._is_held(number) else []

    def blocks_of(self, key: bytes) -> Iterator[Block]:
        """The page, which has the slots of all groups, and its copy in the host tier."""
        page = self._page_of.get(key)
        if page is not None and self._is_held(page):
            yield 0, page
        if self._tier is not None and self._tier.holds(key):
            yield len(self._groups), int.from_bytes(key)

    def is_cached(self, key: bytes) -> bool:
        """Whether any block is cached under the key."""
        return any(True for _ in self.blocks_of(key))

    def _is_held(self, page: int) -> bool:
        return bool(self._cache.inserted_at[page * self.key_tokens] != NEVER)

    def _place(self, block: Block) -> tuple[Place, int]:
        return self._groups[block[0]].place, block[1]

    def _prefix(self, request: Request) -> Tokens:
        scheduler = self._engine.scheduler
        # With a draft model the last token has no key: it takes the one after it, too.
        known = request.length - (self._engine.drafter is not None)
        return scheduler.keys(request.tokens, known)

    # The actions -----------------------------------------------------------------------------------

    def evict(self, blocks: Iterable[Block]) -> None:
        """Take pages out of the radix cache and of the host tier; requests that hold them keep them."""
        wanted = set()
        for group, number in blocks:
            if group < len(self._groups):
                wanted.add(self._key_of[number])
            elif self._tier is not None:
                self._tier.drop(number.to_bytes(KEY_BYTES))
        waiting = [(node, hasher()) for node in self._cache.roots] if wanted else []
        while waiting:
            node, state = waiting.pop()
            for start in range(0, node.tokens.size, self.key_tokens):
                state.update(node.tokens[start : start + self.key_tokens].tobytes())
                if state.digest() in wanted:
                    self._cache.discard(node, start)
                    break
            else:
                waiting += [(child, state.copy()) for child in node.children.values()]

    def recompute(self, request: str) -> int:
        """Start a request again from the last page before the damage."""
        found = self._named(request)
        self._restarts[found.serial] += 1
        return self._engine.recompute(request, self._good(found))

    def end(self, request: str) -> None:
        """The next step returns it as failed."""
        self._engine.fail(request)

    def bar(self, request: str) -> None:
        """Cache nothing that it computes from the damage on."""
        found = self._named(request)
        found.cacheable = min(found.cacheable, self._good(found))

    def quarantine(self, block: Block) -> None:
        """Give this page, window slot or row out no more. Raises QuarantineRefused."""
        place = self._physical(block)
        self._out[place] += 1
        if self._out[place] == 1:
            if (problem := self._too_small(place[0])) is not None:
                del self._out[place]
                raise QuarantineRefused(f"{place[0].value} {place[1]} cannot be left out: {problem}")
            self._set_out(*place, out=True)

    def release(self, block: Block) -> None:
        """Give it out again, if no other group's damage holds it back."""
        place = self._physical(block)
        self._out[place] -= 1
        if not self._out[place]:
            del self._out[place]
            self._set_out(*place, out=False)

    def release_all(self) -> None:
        """Leave nothing withdrawn."""
        for place in list(self._out):
            del self._out[place]
            self._set_out(*place, out=False)

    def _named(self, request: str) -> Request:
        return next(one for one in self._engine.scheduler.running if one.id == request)

    def _good(self, request: Request) -> int:
        """Of a request's tokens, the leading ones that were computed before it read the damage."""
        damage = self.damage
        if damage is None:
            return 0
        if damage.request is not None:
            first: int | None = damage.position if damage.request == request_name(request.id) else None
        else:
            first = self._blocks.first_token(request, damage.group, damage.block)
        if first is None:
            first = request.shared  # of what it shares, the cache keeps what is right
        return first - first % self.key_tokens

    def _physical(self, block: Block) -> tuple[Place, int]:
        place, number = self._place(block)
        return (place, number // 2) if place is Place.BUFFER else (place, number)

    def _too_small(self, place: Place) -> str | None:
        scheduler, config = self._engine.scheduler, self._engine.config
        out = sum(kind is place for kind, _ in self._out)
        if place is Place.PAGE:
            enough = (scheduler.allocator.num_pages - out - 2) * config.page_size >= config.max_context
        elif place is Place.WINDOW:
            enough = config.swa_slots - out >= (config.shape.window or 0) + config.token_budget
        else:
            enough = config.max_running - out >= 1
        return None if enough else "what is left would not hold one request"

    def _set_out(self, place: Place, number: int, *, out: bool) -> None:
        scheduler = self._engine.scheduler
        if place is Place.BUFFER:
            (scheduler.withdraw_row if out else scheduler.restore_row)(number)
            return
        pool = scheduler.allocator
        if place is Place.WINDOW and scheduler.windows is not None:
            pool = scheduler.windows.slots.pool
        (pool.withdraw if out else pool.restore)(number)

    # What is cached --------------------------------------------------------------------------------

    def follow(self, patches: MethodPatches) -> None:
        """Know what is cached, now and from now on."""
        nodes, page = [(node, np.empty(0, node.tokens.dtype)) for node in self._cache.roots], self.key_tokens
        while nodes:
            node, before = nodes.pop()
            tokens = np.concatenate([before, node.tokens])
            self._note(self._keys.list_of(tokens), before.size // page, node.slots[::page] // page)
            nodes += [(child, tokens) for child in node.children.values()]
        if self._tier is not None and any(key not in self.lineage for key in self._tier.keys):
            self.lineage.older = frozenset([*self._page_of, *self._tier.keys])
        patches.wrap(self._cache, "insert", self._around_insert)
        patches.wrap(self._engine.scheduler, "release", self._around_release)
        if self._engine.scheduler.windows is not None:
            patches.wrap(self._engine.scheduler.windows.slots, "drop", self._around_drop)

    def _note(self, keys: Sequence[bytes], first: int, pages: Slots) -> None:
        """Pages were cached under the keys from number `first` on."""
        for key, page in zip(keys[first:], pages.tolist(), strict=True):
            before = self._key_of.get(page)
            if before is not None and self._page_of.get(before) == page:
                del self._page_of[before]
            self._key_of[page], self._page_of[key] = key, page
        self.lineage.follow(keys, len(keys))

    def _around_insert(self, insert: Callable[[Tokens, Slots], int]) -> Callable[..., int]:
        def observed(tokens: Tokens, slots: Slots) -> int:
            held = insert(tokens, slots)
            page = self.key_tokens
            if held < tokens.size:
                self._note(self._keys.list_of(tokens), held // page, slots[held::page] // page)
            return held

        return observed

    def _around_release(self, release: Callable[[Request, Status], None]) -> Callable[..., None]:
        def observed(request: Request, status: Status) -> None:
            self.since.pop(request.serial, None)
            if status is not Status.WAITING:
                self._finished[request_name(request.id)] = self._prefix(request).copy()
                if len(self._finished) > _REMEMBERED:
                    self._finished.popitem(last=False)
                self._restarts.pop(request.serial, None)
                self._keys.forget(request)
            release(request, status)

        return observed

    def _around_drop(self, drop: Callable[[Slots], int]) -> Callable[[Slots], int]:
        def observed(full: Slots) -> int:
            self._blocks.note_dropped(full)
            return drop(full)

        return observed
