"""Decides what is to be done about one damage. A dry run and a real one use the same decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from canary_obs.healing.damage import Damage
from canary_obs.healing.lineage import Lineage
from canary_obs.vocabulary import HealPolicy

MOST_RESTARTS = 3  # of one request: what is found again each time is not cured by computing it again

Block = tuple[int, int]  # the engine's group number, block number


class HeldRequest(NamedTuple):
    """A request that holds blocks, or held some before it was preempted."""

    request: str
    name: str  # as violations name it
    blocks: Sequence[Sequence[int]]  # by group number; may have blocks that hold nothing
    keys: Sequence[bytes]  # of its prefixes, one for each `key_tokens` tokens
    block_tokens: Sequence[int]  # by group number; 0 = a block holds a state of all tokens so far
    computed: int  # tokens whose KV was there before the forward whose results are given out next
    since: int  # number of the forward that it began or went on with; 0 = unknown
    joined: int  # of its tokens, those that it got from the prefix cache then
    sent: int  # output tokens that the engine has given out
    restartable: bool
    restarts: int  # by healing, so far
    # Number of the last forward whose tokens were given out when healing started it again; None = it did not.
    dropped_after: int | None = None
    kept: int = 0  # of its output tokens, those that it began or went on with


class CacheView(Protocol):
    """The engine's blocks and requests as they are between two steps."""

    @property
    def key_tokens(self) -> int:
        """Tokens per key."""

    @property
    def given_out(self) -> int:
        """Number of the last forward whose tokens were given out."""

    def requests(self) -> Iterable[HeldRequest]:
        """All requests that hold blocks, and those without that have given out tokens."""

    def keys_of(self, block: Block) -> Sequence[bytes]:
        """The keys that the block is cached under; none = it is not cached."""

    def finished_keys(self, name: str) -> Sequence[bytes]:
        """The keys of a request that has ended lately, by the name that violations give it."""

    def blocks_of(self, key: bytes) -> Iterable[Block]:
        """All blocks that are cached under the key, of any group."""


class Plan(NamedTuple):
    """What is to be done. Requests that are `left` go on, and nothing they compute may be cached."""

    evict: tuple[Block, ...]
    recompute: tuple[str, ...]
    end: tuple[str, ...]
    left: tuple[str, ...]
    partly_known: bool  # something cached may have been computed from it, and is not known to the lineage

    @property
    def actions(self) -> int:
        """What a limit on actions counts."""
        return bool(self.evict) + len(self.recompute) + len(self.end)


def make_plan(damage: Damage, view: CacheView, lineage: Lineage, policy: HealPolicy) -> Plan:
    """What `policy` does about this damage; DRY_RUN decides as PROTECT."""
    requests = list(view.requests())
    victim: HeldRequest | None = None
    if damage.request is None:
        roots = [] if damage.overwritten else list(view.keys_of((damage.group, damage.block)))
        roots += [key for block in damage.filled for key in view.keys_of(block)]
    else:
        victim = next((held for held in requests if held.name == damage.request), None)
        if victim is not None and _is_cured(victim, damage):
            return Plan((), (), (), (), False)
        chain = view.finished_keys(damage.request) if victim is None else victim.keys
        roots = list(chain[damage.position // view.key_tokens :])
    keys = lineage.descendants(roots)
    cached = dict.fromkeys(block for key in keys for block in view.blocks_of(key))
    recompute, end, left, readers = [], [], [], dict(damage.readers)
    for held in () if damage.kv_intact else requests:
        before = readers.get(held.name)
        if before is not None and _is_anew(held, damage) and held.kept <= before:
            before = None  # it had sent none of them
        # One that waits was started again for what is met once more.
        misread = held is victim and (any(held.blocks) or not damage.again)
        if before is None and not misread and not harmed(held, damage) and not _holds(held, cached, damage):
            continue
        unsent = held.sent <= (before or 0) or (damage.good is not None and damage.good >= view.given_out)
        if not any(held.blocks) and (unsent or policy is HealPolicy.EVICT):
            continue  # it waits, and computes all of it again
        again = held.restartable and held.restarts < MOST_RESTARTS
        if unsent and again and (held.sent == 0 or policy is not HealPolicy.EVICT):
            recompute.append(held.request)
        elif policy is HealPolicy.EVICT:
            left.append(held.request)
        else:
            end.append(held.request)
    unknown = any(key not in lineage or key in lineage.older for key in roots)
    return Plan(tuple(cached), tuple(recompute), tuple(end), tuple(left), unknown)


def harmed(held: HeldRequest, damage: Damage) -> bool:
    """Whether the request has what was damaged, and not what was written over it since."""
    if damage.request is not None or damage.overwritten or damage.group >= len(held.blocks):
        return False
    blocks, size = held.blocks[damage.group], held.block_tokens[damage.group]
    if damage.block not in blocks:
        return False
    position = blocks.index(damage.block) * size + damage.offset
    if position < held.joined:
        return True
    written = damage.fresh or position < held.computed or not size
    return written and held.since <= damage.found


def _is_cured(held: HeldRequest, damage: Damage) -> bool:
    """Whether what the forward computed was dropped when the request was started again."""
    dropped = held.dropped_after is not None and held.dropped_after < damage.found
    return dropped and (not any(held.blocks) or damage.found < held.since)


def _is_anew(held: HeldRequest, damage: Damage) -> bool:
    """Whether what it has filled since it began or went on is later than what is known of the damage."""
    known = damage.found if damage.listed is None else max(damage.found, damage.listed)
    return held.since > known and any(held.blocks)


def _holds(held: HeldRequest, tainted: Mapping[Block, None], damage: Damage) -> bool:
    # Damage is in few groups: a list is searched only for those.
    groups, anew = {group for group, _ in tainted}, _is_anew(held, damage)
    for group in groups:
        if group < len(held.blocks):
            blocks, size = held.blocks[group], held.block_tokens[group]
            if anew and size:
                blocks = blocks[: -(-held.joined // size)]  # it fills the others itself
            if any((group, block) in tainted for block in blocks):
                return True
    return False
