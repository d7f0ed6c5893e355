"""Which requests read which blocks: what an adapter shows when that changes, and never in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]


class BlockTable(NamedTuple):
    """Where the slots of a group are found in requests' block lists."""

    name: str  # of the numbering; groups may share one
    block_slots: int
    block_tokens: int  # of a request's tokens that a block holds
    rewritten: bool = False  # the request writes over its own slots, forward by forward


class AddedBlocks(NamedTuple):
    """Blocks of one numbering that a request reads from the next forward on."""

    blocks: Blocks
    first: int  # number of the first one in the request's list
    joined: int  # so many, the first ones, were filled before; the request fills the others


class GrownBlocks(NamedTuple):
    """A block more of each of these requests, which go on and fill it: what most steps of a decode bring."""

    requests: list[str]
    blocks: list[int]
    numbers: list[int]  # of the block in the request's list
    computed: list[int]  # tokens whose KV is there before the next forward


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChange:
    """A request that began, came back after a preemption, or got blocks."""

    request: str
    begins: bool  # and has no other blocks than these
    prompt: int  # tokens of its prompt; read where it begins
    computed: int  # tokens whose KV is there before the next forward
    added: Mapping[str, AddedBlocks]  # by name of the numbering
    emitted: int | None = None  # tokens, where it came back after a preemption; None = not known


class KeyedBlocks(NamedTuple):
    """Blocks of one numbering, and under which key of a lower tier the copy of each is.

    An empty key: it is not known, or what was loaded was not compared with what was stored.
    """

    keys: Sequence[bytes]
    blocks: Blocks


class StoredIn(NamedTuple):
    """Where copies of blocks may be that later requests load."""

    place: str  # a name for people
    whole: bool  # of whole blocks only
    shown: bool = False  # all of them, by `ChangedRequests.stored` and `loaded`


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRequests:
    """All changes between two forwards."""

    ended: Mapping[str, int | None] = field(
        default_factory=dict
    )  # or preempted; tokens emitted, None = unknown
    changed: Sequence[RequestChange] = ()
    grown: Mapping[str, GrownBlocks] = field(default_factory=dict)  # by name of the numbering
    late: bool = False  # blocks of requests that go on may be held since the changes before these
    stored: Mapping[str, KeyedBlocks] = field(default_factory=dict)  # a lower tier has copies of these
    loaded: Mapping[str, KeyedBlocks] = field(default_factory=dict)  # copies from there are in these
    step: int | None = None  # of the observer, when they came about; None = they are shown at once
    rewrites: bool = False  # a slot may be written more than once by one request, as with drafted tokens
