"""What two engines say to each other about KV on the move. Encoded as msgpack."""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose prompt is computed, from the prefill engine."""

    id: str
    tokens: list[int]  # prompt and first token
    cached: int  # leading tokens whose KV can be had
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
    """The answer to one offer: slots for the positions from `start` on. None = not now, offer again."""

    start: int = 0
    slots: list[int] | None = None


class Grants(msgspec.Struct, frozen=True, kw_only=True):
    """One for each offer, in order."""

    grants: list[Grant]


class RegionMove(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one region and the slots that they go to: the sender says where."""

    region: int  # the layers' KV in order, then their index keys
    slots: list[int]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What follows for one request: each move's bytes in order, then metadata [slots, words]."""

    moves: list[RegionMove]
    words: int  # 0 = no transfer metadata
