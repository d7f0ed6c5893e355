"""Every word that labels, messages and commands may use, with the codes that kernels use for them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Mode(StrEnum):
    """What the canary does: nothing, observe, or stop at the first violation."""

    NONE = "none"
    LOG = "log"
    RAISE = "raise"


class CodedWord(StrEnum):
    """A word that kernels know by an integer: `code`, the same as in canary_kernels.layout.

    Members are in the order of their codes. tests/contracts/test_vocabulary.py compares both sides.
    """

    code: int
    _value_: str

    def __new__(cls, word: str, code: int) -> Self:
        member = str.__new__(cls, word)
        member._value_, member.code = word, code
        return member

    @classmethod
    def from_code(cls, code: int) -> Self:
        """The member with this code. Raises ValueError if there is none."""
        for member in cls:
            if member.code == code:
                return member
        raise ValueError(f"{cls.__name__} has no code {code}; codes are {[member.code for member in cls]}")


class Phase(CodedWord):
    """When a check ran. HIT: before a forward reads slots that joined a request, or that were copied."""

    HEAD = "head", 0
    TAIL = "tail", 1
    SWEEP = "sweep", 2
    PATROL = "patrol", 3
    HIT = "hit", 4


class Reason(CodedWord):
    """Which check failed."""

    CHAIN = "chain", 0
    POSITION = "position", 1
    TOKEN = "token", 2
    KV_DATA = "kv_data", 3
    WRITE_TOKEN = "write_token", 4
    WRITE_POSITION = "write_position", 5
    UNWRITTEN = "unwritten", 6
    LOST_WRITE = "lost_write", 7
    RECORD = "record", 8
    LOST_LOAD = "lost_load", 9


class Part(CodedWord):
    """K or V bytes; code 0 is the record itself, which has no name here."""

    K = "k", 1
    V = "v", 2


class Plane(CodedWord):
    """Elements, or the scales that turn them into numbers."""

    DATA = "data", 0
    SCALES = "scales", 1


class Cause(CodedWord):
    """Why a slot was not checked."""

    ADOPTED = "adopted", 0
    PENDING = "pending", 1
    NO_FINGERPRINT = "no_fingerprint", 2
    BASELINE = "baseline", 3  # its bytes are compared with a fingerprint taken when it was first seen
    EVICTED = "evicted", 4  # counted by the host: kernels never meet such a slot


class HandshakeCause(StrEnum):
    """Why a connection failed; MECHANISM = one side has keys, the other has none; OTHER_USER: Unix socket."""

    UNKNOWN_KEY = "unknown_key"
    SERVICE_KEY = "service_key"
    MECHANISM = "mechanism"
    PROTOCOL = "protocol"
    BROKEN_OFF = "broken_off"
    OTHER_USER = "other_user"


class InvalidCause(StrEnum):
    """Why a message of an engine cannot be true; RANK = no rank has this number, FALLING: a counter fell."""

    NOT_FINITE = "not_finite"
    NEGATIVE = "negative"
    FALLING = "falling"
    RANK = "rank"
    BUCKETS = "buckets"
    TOO_LONG = "too_long"


class State(StrEnum):
    """The verdict on a rank, from best to worst."""

    OK = "ok"
    OFF = "off"
    DEGRADED = "degraded"
    BLIND = "blind"
    VIOLATED = "violated"


_SEVERITY = {state: severity for severity, state in enumerate(State)}


def worst(states: list[State]) -> State:
    """The most severe of some states; OFF for none."""
    return max(states, key=_SEVERITY.__getitem__) if states else State.OFF


class Trigger(StrEnum):
    """What started a sweep."""

    INTERVAL = "interval"
    IDLE = "idle"
    DEMAND = "demand"


class SweepStatus(StrEnum):
    """PASSED only when every slot was checked, skipped with a cause, or evicted meanwhile.

    SCHEDULED: the service waits for the sweep's window; no rank has begun.
    """

    SCHEDULED = "scheduled"
    RUNNING = "running"
    PASSED = "passed"
    VIOLATED = "violated"
    CANCELLED = "cancelled"
    FAILED = "failed"


class PerturbMode(StrEnum):
    """Where deliberate corruption is injected."""

    REQ_TO_TOKEN = "req_to_token"
    REAL_KV_USED = "real_kv_used"
    REAL_KV_UNUSED_CACHE = "real_kv_unused_cache"
    REAL_KV_POST_FORWARD = "real_kv_post_forward"
    NEXT_TOKEN_SWAP = "next_token_swap"


class DrillOutcome(StrEnum):
    """How a drill ended on one rank; REFUSED = no fault was injected."""

    DETECTED = "detected"
    MISSED = "missed"
    REFUSED = "refused"
    UNANSWERED = "unanswered"


class HealPolicy(StrEnum):
    """What is done about damage, from the least to the most; DRY_RUN says what PROTECT would do."""

    OFF = "off"
    DRY_RUN = "dry_run"
    EVICT = "evict"
    PROTECT = "protect"
    REPAIR = "repair"


class HealAction(StrEnum):
    """What healing does: to cached blocks, a running request, a block of the pool, or a slot's bytes."""

    EVICT = "evict"
    RECOMPUTE = "recompute"
    END = "end"
    QUARANTINE = "quarantine"
    RELEASE = "release"
    REPAIR = "repair"


class HealOutcome(StrEnum):
    """How an action ended. WOULD: in a dry run; LIMITED: a guard rail forbade it; FAILED: the engine raised.

    REFUSED: not done, for it is not known for certain what was there before.
    UNVERIFIED: done, and copies in lower tiers, or blocks cached before healing began, may be left.
    """

    DONE = "done"
    WOULD = "would"
    LIMITED = "limited"
    FAILED = "failed"
    UNVERIFIED = "unverified"
    REFUSED = "refused"


class SlotState(CodedWord):
    """State of a record: PENDING between head and tail; the last three = live, with unknown history.

    BASELINE = fingerprinted when first seen; AWAITED = its bytes are on their way.
    """

    EMPTY = "empty", 0
    PENDING = "pending", 1
    COMPLETE = "complete", 2
    ADOPTED = "adopted", 3
    BASELINE = "baseline", 4
    AWAITED = "awaited", 5


UNKNOWN_PEER = "unknown"  # bytes came from elsewhere, and the engine does not say from whom
HOST_PEER = "host"  # they came from this host's own memory
OTHER_PEERS = "other"  # beyond the first of a rank


class SlotEventKind(StrEnum):
    """What the engine announced about a slot."""

    WRITTEN = "written"
    COPIED_FROM = "copied_from"
    COPIED_TO = "copied_to"
    AWAITED = "awaited"
    RECEIVED = "received"
    INVALIDATED = "invalidated"


class Completeness(StrEnum):
    """Whether every request that read damage is known."""

    KNOWN = "known"
    UNKNOWN = "unknown"


class GoodCheck(StrEnum):
    """The last check that found a slot intact: damage came after it."""

    FORWARD = "forward"  # every forward checks it for each of its requests
    WRITTEN = "written"  # none since the slot was filled
    HIT = "hit"
    PATROL = "patrol"
    ATTACHED = "attached"  # none since the canary attached, and it was filled before that


class ObserverPart(StrEnum):
    """The part of the observer that raised: label `part` of kv_canary_observer_faults_total."""

    HEAD = "head"
    TAIL = "tail"
    SWEEP = "sweep"
    PATROL = "patrol"
    COUNTERS = "pump"
    COMMANDS = "mailbox"
    ANNOUNCE = "announce"
    ADOPT = "adopt"
    STEP_VIEW = "step_view"
    UNCLOSED_FORWARD = "unclosed_forward"
    EVIDENCE = "evidence"
    SWA_DIVERGENCE = "swa_divergence"
    ATTACH = "attach"
    SNAPSHOT = "snapshot"
    DRILL = "drill"
    TRANSFER = "transfer"
    HOST_TIER = "host_tier"
    PERTURBATION = "perturbation"
    TAINT = "taint"
    HEALING = "healing"
