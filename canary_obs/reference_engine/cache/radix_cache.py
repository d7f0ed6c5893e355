"""The prefix cache: a radix tree over token pages whose nodes own KV slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.signedinteger[Any]]  # by position; anything that distinguishes prefixes
Slots = NDArray[np.int64]

NEVER = int(np.iinfo(np.int64).max)


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A run of whole pages of tokens and the slots that hold their KV."""

    serial: int
    tokens: Tokens
    slots: Slots
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0  # running requests that use this node
    last_used: int = 0
    detached: bool = False  # it was discarded while it was locked


class RadixCache:
    """Longest-prefix match, locking along the path, eviction of the least recently used leaf.

    Per-slot arrays mirror what the tree holds, so that it can be listed without walking tokens.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.clock = 0  # advances at every match and insertion
        self.evictable = 0  # slots in unlocked nodes
        self.size = 0  # slots in all nodes
        self.removed = 0  # slots that left the tree since the start
        self.inserted_at = np.full(num_slots, NEVER, dtype=np.int64)  # clock of insertion; NEVER = not held
        self.position = np.zeros(num_slots, dtype=np.int64)
        self.previous = np.full(num_slots, -1, dtype=np.int64)  # slot of the position before; -1 = first
        self.locked = np.zeros(num_slots, dtype=np.bool_)
        self.detached = np.zeros(num_slots, dtype=np.bool_)  # discarded, and in use still
        self.unused: Callable[[Slots], None] = _keep  # gets discarded slots as soon as nobody uses them
        self._root = Node(
            serial=0, tokens=np.empty(0, np.int32), slots=np.empty(0, np.int64), parent=None, locks=1
        )
        self._serial = 0
        self._leaves: set[Node] = set()

    def match(self, tokens: Tokens) -> tuple[Slots, Node]:
        """Slots of the longest cached prefix in whole pages, and the node it ends at."""
        self.clock += 1
        node, found, path = self._descend(tokens)
        del found
        return (np.concatenate(path) if path else self._root.slots), node

    def insert(self, tokens: Tokens, slots: Slots) -> int:
        """Give whole pages to the tree; returns how many leading tokens it held already and did not take."""
        if tokens.size % self.page_size or tokens.size != slots.size:
            raise ValueError(
                f"{tokens.size} tokens with {slots.size} slots: the tree holds whole pages; "
                f"cut both to a multiple of page_size={self.page_size}"
            )
        self.clock += 1
        node, found, _ = self._descend(tokens)
        if found < tokens.size:
            self._attach(node, tokens[found:].copy(), slots[found:].copy(), found)
        return found

    def lock(self, node: Node) -> None:
        """Keep the path from the root to this node from being evicted."""
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.evictable -= step.slots.size
                self.locked[step.slots] = True
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock of the same node."""
        step: Node | None = node
        while step is not None:
            if step.locks == 0 or (step is self._root and step.locks == 1):
                raise ValueError(f"node {step.serial} is not locked; unlock once for each lock")
            step.locks -= 1
            if step.locks == 0:
                self.locked[step.slots] = False
                if step.detached:
                    self.detached[step.slots] = False
                    self.unused(step.slots)
                else:
                    self.evictable += step.slots.size
            step = step.parent

    def discard(self, node: Node, start: int) -> int:
        """Take a node's pages from its token `start` on out of the tree, and all that goes on from them.

        Requests that use them keep them, as `detached` slots; the others are `unused` at once. Returns how
        many slots have left the tree.
        """
        if start:
            self._split(node, start)
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.tokens)]
        if not parent.children and parent is not self._root:
            self._leaves.add(parent)
        before, waiting = self.size, [node]
        while waiting:
            each = waiting.pop()
            waiting += each.children.values()
            each.children = {}
            self._leaves.discard(each)
            self._leave(each)
            if each.locks:
                each.detached = True
                self.detached[each.slots] = True
            else:
                self.evictable -= each.slots.size
                self.unused(each.slots)
        return before - self.size

    def attached(self, node: Node) -> int:
        """Of the tokens up to the end of a node, the leading ones that are in the tree still."""
        sizes: list[int] = []
        step, cut = node, 0
        while step.parent is not None:
            sizes.append(step.slots.size)
            if step.detached:
                cut = len(sizes)
            step = step.parent
        return sum(sizes[cut:])

    @property
    def roots(self) -> list[Node]:
        """The nodes that begin with the first token of a prompt."""
        return list(self._root.children.values())

    def evict(self, wanted: int, leaving: Callable[[Node], None] | None = None) -> list[Slots]:
        """Drop least recently used unlocked leaves until `wanted` slots are gone or none is left.

        `leaving` sees each leaf just before it goes.
        """
        heap = [(leaf.last_used, leaf.serial, leaf) for leaf in self._leaves if leaf.locks == 0]
        heapq.heapify(heap)
        dropped: list[Slots] = []
        while wanted > 0 and heap:
            leaf = heapq.heappop(heap)[2]
            if leaving is not None:
                leaving(leaf)
            parent = self._detach(leaf)
            dropped.append(leaf.slots)
            wanted -= leaf.slots.size
            if not parent.children and parent.locks == 0:
                heapq.heappush(heap, (parent.last_used, parent.serial, parent))
        return dropped

    def tokens_to(self, node: Node) -> Tokens:
        """Every token from the root to the end of a node."""
        runs: list[Tokens] = []
        step: Node | None = node
        while step is not None:
            runs.append(step.tokens)
            step = step.parent
        return np.concatenate(runs[::-1])

    def oldest_first(self) -> list[Node]:
        """Every node, least recently used first."""
        nodes, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack += node.children.values()
        return sorted(nodes, key=lambda node: (node.last_used, node.serial))

    def held(self, *, unlocked_only: bool = False) -> Slots:
        """Every slot the tree holds, in slot order."""
        held = self.inserted_at != NEVER
        return np.flatnonzero(held & ~self.locked if unlocked_only else held)

    def _descend(self, tokens: Tokens) -> tuple[Node, int, list[Slots]]:
        node, found = self._root, 0
        path: list[Slots] = []
        while tokens.size - found >= self.page_size:
            child = node.children.get(self._key(tokens, found))
            if child is None:
                break
            common = self._common(child.tokens, tokens[found:])
            if common < child.tokens.size:
                child = self._split(child, common)
            child.last_used = self.clock
            path.append(child.slots)
            found += common
            node = child
        return node, found, path

    def _key(self, tokens: Tokens, start: int = 0) -> bytes:
        return tokens[start : start + self.page_size].tobytes()

    def _common(self, held: Tokens, wanted: Tokens) -> int:
        size = min(held.size, wanted.size)
        differ = held[:size] != wanted[:size]
        common = int(differ.argmax()) if differ.any() else size
        return common - common % self.page_size

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; the new upper half is returned, `node` stays the end that locks refer to."""
        parent = node.parent
        assert parent is not None
        self._serial += 1
        upper = Node(
            serial=self._serial,
            tokens=node.tokens[:at],
            slots=node.slots[:at],
            parent=parent,
            locks=node.locks,
            last_used=node.last_used,
        )
        parent.children[self._key(node.tokens)] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _attach(self, parent: Node, tokens: Tokens, slots: Slots, start: int) -> None:
        self._serial += 1
        node = Node(serial=self._serial, tokens=tokens, slots=slots, parent=parent, last_used=self.clock)
        parent.children[self._key(tokens)] = node
        self._leaves.discard(parent)
        self._leaves.add(node)
        self.evictable += slots.size
        self.size += slots.size
        self.inserted_at[slots] = self.clock
        self.position[slots] = np.arange(start, start + slots.size)
        self.previous[slots[1:]] = slots[:-1]
        self.previous[slots[0]] = parent.slots[-1] if parent.slots.size else -1

    def _detach(self, leaf: Node) -> Node:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._key(leaf.tokens)]
        leaf.parent = None
        self._leaves.discard(leaf)
        if not parent.children and parent is not self._root:
            self._leaves.add(parent)
        self.evictable -= leaf.slots.size
        self._leave(leaf)
        return parent

    def _leave(self, node: Node) -> None:
        self.size -= node.slots.size
        self.removed += node.slots.size
        self.inserted_at[node.slots] = NEVER


def _keep(slots: Slots) -> None:
    """Of a tree without an owner that takes slots back."""
    del slots
