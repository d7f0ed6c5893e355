"""What two engines say to each other about KV on the move. Encoded as msgpack."""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose prompt is computed, from the prefill engine."""

    id: str
    tokens: list[int]  # prompt and first token
    cached: int  # leading tokens whose KV can be had
    window_from: int = 0  # first of them whose KV of sliding-window layers can be had, too
    max_tokens: int
    temperature: float
    seed: int
    stop_at_eos: bool
    metadata_kind: int


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """All that is ready now, in order. `closing` = nothing will follow."""

    offers: list[Offer]
    closing: bool = False


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one offer: slots for the positions from `start` on. None = not now, offer again.

    Sliding-window layers have slots of their own, for positions that are listed.
    """

    start: int = 0
    slots: list[int] | None = None
    window_positions: list[int] = []
    window_slots: list[int] = []  # of these positions


class Grants(msgspec.Struct, frozen=True, kw_only=True):
    """One for each offer, in order."""

    grants: list[Grant]


class RegionMove(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one region and the slots that they go to: the sender says where."""

    region: int  # in the order of `regions`
    slots: list[int]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What follows for one request: each move's bytes in order, then metadata by numbering [slots, words]."""

    moves: list[RegionMove]
    words: list[int]  # by numbering, in the order of `places`; 0 = no transfer metadata
