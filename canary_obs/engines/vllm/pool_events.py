"""What a scheduler's block pool reports to the workers of the prefix cache."""

from __future__ import annotations

from typing import NamedTuple

from canary_obs.engines.toolkit.later import Later

# Of a long prompt they take longer than all else that precedes its load. None = they could not be read.
LaterTokens = Later[bytes] | bytes | None


class Published(NamedTuple):
    """The pool cached a block: the request's `number`-th one, with `filled` valid tokens."""

    group: int
    block: int
    number: int
    previous: int  # the request's block before it; -1 = none or null
    filled: int


class PublishedRun(NamedTuple):
    """The pool cached consecutive blocks of a request; one event, as a long prompt has hundreds of blocks."""

    group: int
    blocks: tuple[int, ...]  # at least two
    number: int  # of the first
    previous: int  # before the first
    filled: int  # tokens valid in each

    def single(self, place: int) -> Published:
        """The event of `blocks[place]` alone."""
        previous = self.blocks[place - 1] if place else self.previous
        return Published(self.group, self.blocks[place], self.number + place, previous, self.filled)


class Partial(NamedTuple):
    """The pool cached the first `filled` tokens of a block; it may hold more of the block already."""

    group: int
    block: int
    number: int
    filled: int


class Loaded(NamedTuple):
    """A KV connector fills consecutive blocks of a request with bytes from outside; one event per group.

    It was asked for the request's tokens from `start` up to `stop`, and may write the blocks' others.
    """

    group: int
    blocks: tuple[int, ...]  # 0 = the null block: out of a window, never loaded
    number: int  # of the first
    start: int
    stop: int
    request: str


class LoadTokens(NamedTuple):
    """Tokens of a request whose `Loaded` events follow: int32, from its first to the last that is loaded."""

    request: str
    tokens: LaterTokens


class EventsLost(NamedTuple):
    """So many events before this one were dropped: the worker no longer knows what is cached."""

    events: int


# Events are in order. An int is a block that was evicted; None = the whole cache was reset.
BlockEvent = Published | PublishedRun | Partial | LoadTokens | Loaded | EventsLost | int | None
