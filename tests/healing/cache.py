"""A small paged cache with shared prefixes, as healing sees an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from canary_obs.errors import QuarantineRefused
from canary_obs.healing.plan import Block, HeldRequest

KEY_TOKENS = 4


@dataclass
class Running:
    name: str
    tokens: list[int]  # of whole blocks
    blocks: list[int]
    sent: int = 0
    restarts: int = 0
    computed: int | None = None  # None = all
    since: int = 0
    joined: int = 0
    restartable: bool = True
    dropped_after: int | None = None
    kept: int = 0

    @property
    def keys(self) -> list[bytes]:
        return [bytes(self.tokens[: end + KEY_TOKENS]) for end in range(0, len(self.tokens), KEY_TOKENS)]


@dataclass
class Cache:
    """Actor of two groups that have the same blocks; each knows which requests were computed from what."""

    pool: int = 64
    groups: int = 1
    copies_elsewhere: str | None = None
    key_tokens: int = KEY_TOKENS
    given_out: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    cached: dict[int, bytes] = field(default_factory=dict)  # by block of group 0
    finished: dict[str, list[bytes]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    barred: set[str] = field(default_factory=set)
    out: set[Block] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)  # blocks that cannot be left out
    broken: bool = False

    @property
    def pool_blocks(self) -> int:
        return self.pool

    def add(self, name: str, tokens: Sequence[int], blocks: Sequence[int], *, sent: int = 0) -> Running:
        request = Running(name, list(tokens), list(blocks), sent)
        self.running[name] = request
        self.cached.update(zip(request.blocks, request.keys, strict=True))
        return request

    def requests(self) -> Iterator[HeldRequest]:
        for each in self.running.values():
            yield HeldRequest(
                request=each.name, name=each.name, blocks=[each.blocks], keys=each.keys, sent=each.sent,
                block_tokens=[KEY_TOKENS],
                computed=len(each.tokens) if each.computed is None else each.computed,
                since=each.since, joined=each.joined, restartable=each.restartable, restarts=each.restarts,
                dropped_after=each.dropped_after, kept=each.kept,
            )  # fmt: skip

    def finished_keys(self, name: str) -> Sequence[bytes]:
        return self.finished.get(name, ())

    def keys_of(self, block: Block) -> list[bytes]:
        return [self.cached[block[1]]] if block[1] in self.cached else []

    def blocks_of(self, key: bytes) -> list[Block]:
        return [(0, block) for block, held in self.cached.items() if held == key]

    def evict(self, blocks: Iterable[Block]) -> None:
        if self.broken:
            raise RuntimeError("no such block")
        for _, block in blocks:
            del self.cached[block]

    def recompute(self, request: str) -> int:
        self.again.append(request)
        return len(self.running.pop(request).tokens)

    def end(self, request: str) -> None:
        self.ended.append(request)
        del self.running[request]

    def bar(self, request: str) -> None:
        self.barred.add(request)

    def quarantine(self, block: Block) -> None:
        if block[1] in self.needed:
            raise QuarantineRefused("it would not hold one request")
        self.out.add(block)

    def release(self, block: Block) -> None:
        self.out.remove(block)
