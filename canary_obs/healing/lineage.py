"""Which cached content was computed from which: each prefix from the prefix before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence


class Lineage:
    """The tree of prefixes that were cached. A key names the tokens of a whole prefix, whoever computed it.

    Prefixes that are neither cached nor have a cached one after them are forgotten a few at a time, so
    that memory stays within twice the cached ones, and no call takes long.
    """

    def __init__(self, cached: Callable[[bytes], bool]) -> None:
        """`cached`: whether any block is cached under this key now."""
        self._cached = cached
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._order: deque[bytes] = deque()  # all keys, each once
        self.older: frozenset[bytes] = frozenset()  # what goes on from these is not all known

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._parents

    def follow(self, chain: Sequence[bytes], count: int) -> None:
        """The first `count` keys of a request's prefixes, shortest first; what is known already is free."""
        parents, number, added = self._parents, count - 1, 0
        while number >= 0 and (key := chain[number]) not in parents:
            parent = chain[number - 1] if number else None
            parents[key] = parent
            if parent is not None:
                self._children.setdefault(parent, set()).add(key)
            self._order.append(key)
            number, added = number - 1, added + 1
        self._forget(2 * added)

    def extend(self, parent: bytes | None, key: bytes) -> None:
        """A prefix that ends within a block, after `parent`."""
        self.follow((key,) if parent is None else (parent, key), 1 if parent is None else 2)

    def descendants(self, roots: Iterable[bytes]) -> list[bytes]:
        """These keys and all that were computed from them, each once, nearest first."""
        found = dict.fromkeys(roots)
        waiting = deque(found)
        while waiting:
            for child in self._children.get(waiting.popleft(), ()):
                if child not in found:
                    found[child] = None
                    waiting.append(child)
        return list(found)

    def _forget(self, steps: int) -> None:
        order = self._order
        for _ in range(min(steps, len(order))):
            key = order.popleft()
            if key in self._children or self._cached(key):
                order.append(key)
                continue
            parent = self._parents.pop(key)
            if parent is not None and (siblings := self._children.get(parent)) is not None:
                siblings.discard(key)
                if not siblings:
                    del self._children[parent]
