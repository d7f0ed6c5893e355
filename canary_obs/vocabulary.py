"""The closed vocabularies: every word a label, a record or a command may use."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """What the canary does: nothing, observe, or stop at the first violation."""

    NONE = "none"
    LOG = "log"
    RAISE = "raise"


class Phase(StrEnum):
    """When a check ran."""

    HEAD = "head"
    TAIL = "tail"
    SWEEP = "sweep"
    PATROL = "patrol"


class Reason(StrEnum):
    """Which check failed."""

    CHAIN = "chain"
    POSITION = "position"
    TOKEN = "token"
    KV_DATA = "kv_data"
    WRITE_TOKEN = "write_token"
    WRITE_POSITION = "write_position"
    UNWRITTEN = "unwritten"
    LOST_WRITE = "lost_write"


class Part(StrEnum):
    """K or V bytes."""

    K = "k"
    V = "v"


class Plane(StrEnum):
    """Elements, or the scales that turn them into numbers."""

    DATA = "data"
    SCALES = "scales"


class Cause(StrEnum):
    """Why a slot was not checked."""

    ADOPTED = "adopted"
    PENDING = "pending"
    NO_FINGERPRINT = "no_fingerprint"
    EVICTED = "evicted"


class HandshakeCause(StrEnum):
    """Why a connection to the service came to nothing; MECHANISM = one side has keys, the other none."""

    UNKNOWN_KEY = "unknown_key"
    SERVICE_KEY = "service_key"
    MECHANISM = "mechanism"
    PROTOCOL = "protocol"
    BROKEN_OFF = "broken_off"


class State(StrEnum):
    """The verdict, best first: OK, OFF, DEGRADED, BLIND, VIOLATED (`worst` picks the last)."""

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
    """PASSED only when every slot was checked, skipped with a cause, or evicted meanwhile."""

    RUNNING = "running"
    PASSED = "passed"
    VIOLATED = "violated"
    CANCELLED = "cancelled"
    FAILED = "failed"


class PerturbMode(StrEnum):
    """Planted corruption on purpose."""

    REQ_TO_TOKEN = "req_to_token"
    REAL_KV_USED = "real_kv_used"
    REAL_KV_UNUSED_CACHE = "real_kv_unused_cache"
    REAL_KV_POST_FORWARD = "real_kv_post_forward"


class DrillOutcome(StrEnum):
    """How a drill ended on one rank; REFUSED = nothing was planted."""

    DETECTED = "detected"
    MISSED = "missed"
    REFUSED = "refused"
    UNANSWERED = "unanswered"


class SlotState(StrEnum):
    """The life of a record: PENDING between head and tail; ADOPTED = live, but no history known."""

    EMPTY = "empty"
    PENDING = "pending"
    COMPLETE = "complete"
    ADOPTED = "adopted"


class SlotEventKind(StrEnum):
    """What happened to a slot by the engine's own announcement."""

    WRITTEN = "written"
    COPIED_FROM = "copied_from"
    COPIED_TO = "copied_to"
    RECEIVED = "received"
    INVALIDATED = "invalidated"


class ObserverPart(StrEnum):
    """The part of the observer in which an exception was caught: label `part` of observer_faults_total."""

    HEAD = "head"
    TAIL = "tail"
    SWEEP = "sweep"
    PATROL = "patrol"
    PUMP = "pump"
    MAILBOX = "mailbox"
    ANNOUNCE = "announce"
    ADOPT = "adopt"
    STEP_VIEW = "step_view"
    EVIDENCE = "evidence"
    SWA_DIVERGENCE = "swa_divergence"
    ATTACH = "attach"
    SNAPSHOT = "snapshot"
    DRILL = "drill"
    TRANSFER = "transfer"
    HOST_TIER = "host_tier"
