"""What is known of KV that an engine sends another: sealed, for one request, in shares of heads and layers.

As text, so that it can travel with whatever a router passes from prefill to decode: MAGIC, a seal of 16
bytes and msgpack, in base64. The seal is a keyed hash; without a key it only shows damage.
"""

from __future__ import annotations

import binascii
import hmac
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from ipaddress import ip_address

import msgspec

MAGIC = b"kvt1"
_SEAL_BYTES = 16
_MOST_BYTES = 1 << 24
_WORD = 1 << 64
log = logging.getLogger("canary_obs")

Fold = tuple[int, int]  # of K and V of a block
Folds = list[Fold | None]  # None = a record of the block was not complete


class GroupShare(msgspec.Struct, frozen=True):
    """A rank's part of a group, or a share of its heads: folds of the blocks in the order of their tokens."""

    format: int  # `Observer.record_format`
    block_size: int
    sources: list[tuple[int, int, int, int]]  # layer, part, first head, heads: what the folds are made of
    folds: Folds


class SentRecords(msgspec.Struct, frozen=True):
    """The fingerprints of one request's blocks."""

    engine: str  # the sender's id, and its name of the request: those of another are not believed
    request: str
    tokens: int  # that the blocks hold
    shares: list[dict[str, GroupShare]]  # of each rank, or of each share of its heads, by group
    instance: str = ""  # the sender's, as findings name it


def joined(shares: Iterable[GroupShare], own: GroupShare) -> Folds:
    """The folds that `own`'s rank should find, out of the senders' shares; empty = they do not make it up.

    Folds of shares sum to the fold of the whole. `own` has no folds.
    """
    wanted = _parts(own)
    found: set[tuple[int, int, int]] = set()
    sums: Folds = []
    for share in shares:
        parts = _parts(share)
        if (share.format, share.block_size) != (own.format, own.block_size):
            return []
        if not parts <= wanted or parts <= found:  # of other ranks' heads, or of a replica
            continue
        if parts & found or (found and len(share.folds) != len(sums)):
            return []
        sums = [_sum(pair) for pair in zip(sums, share.folds, strict=True)] if found else list(share.folds)
        found |= parts
    return sums if found == wanted else []


def _parts(share: GroupShare) -> set[tuple[int, int, int]]:
    """Each layer, part and head."""
    return {
        (layer, part, head)
        for layer, part, first, count in share.sources
        for head in range(first, first + count)
    }


def _sum(pair: Sequence[Fold | None]) -> Fold | None:
    left, right = pair
    if left is None or right is None:
        return None
    return _signed(left[0] + right[0]), _signed(left[1] + right[1])


def _signed(value: int) -> int:
    value %= _WORD
    return value - _WORD if value >= _WORD >> 1 else value


class Seals:
    """Seals records with a key that both engines have, and opens them. Refused ones are counted."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key or b""
        self.refused = 0

    def seal(self, records: SentRecords) -> str:
        """The records as text."""
        body = msgspec.msgpack.encode(records)
        return b64encode(MAGIC + self._sealed(body) + body).decode("ascii")

    def open(self, text: object, host: str, engine: str, request: str) -> SentRecords | None:
        """What the sender at `host` says of this request; None = it cannot be believed.

        Without a key only a sender of the same host is believed.
        """
        try:
            records = self._opened(text, host)
            if (records.engine, records.request) != (engine, request):
                raise ValueError("they belong to another request")
        except (ValueError, msgspec.DecodeError) as error:
            if self.refused == 0:
                log.warning(
                    "canary_obs: records that came with KV are not believed: %s; what comes is unverified",
                    error,
                )
            self.refused += 1
            return None
        return records

    def _opened(self, text: object, host: str) -> SentRecords:
        if not self._key and not _is_local(host):
            raise ValueError(f"they crossed hosts ({host}), and KV_CANARY_COPY_RECORDS_KEY_FILE is not set")
        if not isinstance(text, str) or len(text) > _MOST_BYTES:
            raise ValueError("they are no text of this version")
        try:
            data = b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError("they are no base64") from error
        head = len(MAGIC) + _SEAL_BYTES
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError("they are of another version")
        if not hmac.compare_digest(data[len(MAGIC) : head], self._sealed(data[head:])):
            raise ValueError("their seal does not hold")
        return msgspec.msgpack.decode(data[head:], type=SentRecords)

    def _sealed(self, body: bytes) -> bytes:
        return blake2b(body, digest_size=_SEAL_BYTES, key=self._key).digest()


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
