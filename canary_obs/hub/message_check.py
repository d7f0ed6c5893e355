"""Messages that cannot be true: no engine of this release sends them, so that none is shown or kept."""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.hub.counters import COUNTER_FIELDS
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies, PerturbCount
from canary_obs.records import EngineMessage, Goodbye, PatrolProgress, PipelineStatus, Snapshot
from canary_obs.vocabulary import InvalidCause

LABEL_LENGTH = 256  # characters of a name that becomes a label, or a key of the hub
TEXT_LENGTH = 65_536  # characters of any other text
NAMES = 256  # entries of a mapping: groups, hooks, settings
ENTRIES = 1 << 16  # of a list
RANKS = 1 << 16  # KV_CANARY_RANK and KV_CANARY_EXPECTED_RANKS are below

_REMEDY = "Run the same canary_obs release in engine and service, or end the program that sends this."
_LABELS = {
    *("engine", "instance", "device", "backend", "engine_version", "name", "group"),
    *("id", "sweep_id", "boot_id", "incident", "incidents", "node", "model", "peer"),
    *("gpu_uuid", "pci_bus_id", "gpu_model", "gpu_instance", "driver_version"),
}
# -1 = none, a difference of two clocks that are read one after the other, or a clock with any start.
_SIGNED = {"slot", "position", "token", "lag_steps", "lag_seconds", "monotonic_ns"}
_OUTCOMES = tuple(name for name in PerturbCount.__struct_fields__ if name != "open")
# Counters of the structures that hold gauges as well.
_COUNTED: dict[type, tuple[str, ...]] = {
    PipelineStatus: ("skipped",),
    PatrolProgress: ("cycles",),
    PerturbCount: _OUTCOMES,
}


class InvalidMessage(CanaryError):
    """A value of a message cannot be true; `cause` is the label of the counter."""

    def __init__(self, cause: InvalidCause, path: str, value: object, rule: str) -> None:
        self.cause = cause
        super().__init__(f"{path}={value!r}: {rule}. {_REMEDY}")


def check_message(message: EngineMessage, previous: Snapshot | None) -> None:
    """Refuse a message whose values cannot be. Raises InvalidMessage.

    previous: the newest snapshot of the same process; its counters cannot fall. None = it has sent none.
    """
    rank = message.identity.rank
    if not 0 <= rank < RANKS:
        raise InvalidMessage(InvalidCause.RANK, "rank", rank, f"a rank is 0 to {RANKS - 1}")
    _check_struct(message, "")
    snapshot = message.final if isinstance(message, Goodbye) else message
    if not isinstance(snapshot, Snapshot):
        return
    if snapshot.identity != message.identity:
        rule = "the final snapshot is that of another rank"
        raise InvalidMessage(InvalidCause.RANK, "final.identity", snapshot.identity.key, rule)
    # The hub ignores a snapshot that was overtaken: it may count less.
    if previous is not None and snapshot.sequence > previous.sequence:
        for name in COUNTER_FIELDS:
            _check_rising(getattr(snapshot, name), getattr(previous, name), name)


def _check_struct(struct: msgspec.Struct, path: str) -> None:
    if isinstance(struct, Latencies) and len(struct.counts) != len(LATENCY_BOUNDS) + 1:
        rule = f"a histogram has {len(LATENCY_BOUNDS) + 1} buckets"
        raise InvalidMessage(InvalidCause.BUCKETS, f"{path}counts", len(struct.counts), rule)
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if value is not None and not (type(value) is int and value >= 0):  # nearly all: twice as fast
            _check(value, name, path)


def _check(value: Any, name: str, path: str) -> None:
    """`name`: of the field; `path`: of what holds it, with a dot at its end."""
    if isinstance(value, str):
        _check_text(value, name, path)
    elif isinstance(value, (int, float)):
        if not isfinite(value):
            raise InvalidMessage(InvalidCause.NOT_FINITE, path + name, value, "numbers are finite")
        if value < 0 and name not in _SIGNED:
            raise InvalidMessage(InvalidCause.NEGATIVE, path + name, value, "it cannot be negative")
    elif isinstance(value, dict):
        if len(value) > NAMES:
            rule = f"at most {NAMES} entries"
            raise InvalidMessage(InvalidCause.TOO_LONG, path + name, len(value), rule)
        inner = f"{path}{name}."
        for key, entry in value.items():
            if len(key) > LABEL_LENGTH:
                _check_text(key, "name", inner)
            if type(entry) is not int or entry < 0:
                _check(entry, key, inner)
    elif isinstance(value, tuple):
        if len(value) > ENTRIES:
            raise InvalidMessage(InvalidCause.TOO_LONG, path + name, len(value), f"at most {ENTRIES} entries")
        for entry in value:
            _check(entry, name, path)
    elif isinstance(value, msgspec.Struct):
        _check_struct(value, f"{path}{name}.")


def _check_text(text: str, name: str, path: str) -> None:
    limit = LABEL_LENGTH if name in _LABELS else TEXT_LENGTH
    if len(text) > limit:
        rule = f"at most {limit} characters, it has {len(text)}"
        raise InvalidMessage(InvalidCause.TOO_LONG, path + name, text[:32] + "...", rule)


def _check_rising(new: Any, old: Any, path: str) -> None:
    """What one of them does not say is not compared."""
    if new is None or old is None:
        return
    if isinstance(new, (int, float)):
        if new < old:
            raise InvalidMessage(InvalidCause.FALLING, path, new, f"a counter cannot fall; it was {old!r}")
    elif isinstance(new, dict):
        for key, count in new.items():
            before = old.get(key)
            if type(count) is not int or type(before) is not int or count < before:
                _check_rising(count, before, f"{path}.{key}")
    elif isinstance(new, tuple):
        for counted, before in zip(new, old, strict=True):
            _check_rising(counted, before, path)
    else:
        for name in _COUNTED.get(type(new), new.__struct_fields__):
            _check_rising(getattr(new, name), getattr(old, name), f"{path}.{name}")
