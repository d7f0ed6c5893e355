"""Which requests read damage, as the ranks reported it, by damage."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from canary_obs.records import Identity, Tainted
from canary_obs.slot_facts import TaintedRequest
from canary_obs.vocabulary import Completeness, GoodCheck, Phase, Reason

DAMAGES_KEPT = 1024
_OF_ONE = 4096  # requests of one damage
_Key = tuple[str, str, int, int, int]  # engine, instance, rank, start of its process, number of the damage


class Taint(msgspec.Struct, frozen=True, kw_only=True):
    """A damage and every request that read it so far, or what was computed from it.

    `number` counts changes from 1 since the service started: a damage that changes gets a new one.
    """

    number: int
    incident: str  # id
    identity: Identity
    group: str
    slot: int
    reason: Reason
    phase: Phase
    step: int  # of the first detection
    good_step: int  # of the last good check: damage came after it
    good_check: GoodCheck
    completeness: Completeness  # `unknown`: there may be more requests than these
    cause: str | None
    time_ns: int  # of the change, by the engine's clock
    requests: tuple[TaintedRequest, ...]


class TaintStore:
    """Bounded: the damages that changed last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Taint] = OrderedDict()  # by number
        self.total = 0  # changes
        self.forgotten = 0  # number of the newest damage that is not kept

    def incident_of(self, message: Tainted) -> str | None:
        """The id of the incident that a damage was filed under; None = it is new."""
        with self._lock:
            known = self._kept.get(_key(message))
            return None if known is None else known.incident

    def add(self, message: Tainted, incident: str) -> Taint:
        """File what a rank reports of a damage; `incident`: the id for a new one."""
        with self._lock:
            key = _key(message)
            known = self._kept.pop(key, None)
            requests = {} if known is None else {one.request: one for one in known.requests}
            for one in message.requests:
                if one.request in requests or len(requests) < _OF_ONE:
                    requests[one.request] = one
            self.total += 1
            taint = Taint(
                number=self.total, incident=incident if known is None else known.incident,
                identity=message.identity, group=message.group, slot=message.slot, reason=message.reason,
                phase=message.phase, step=message.step, good_step=message.good_step,
                good_check=message.good_check, completeness=message.completeness, cause=message.cause,
                time_ns=message.time_ns, requests=tuple(requests.values()),
            )  # fmt: skip
            self._kept[key] = taint
            if len(self._kept) > DAMAGES_KEPT:
                _, oldest = self._kept.popitem(last=False)
                self.forgotten = oldest.number
            return taint

    def after(self, number: int) -> list[Taint]:
        """Damages that changed since, in the order of their changes."""
        with self._lock:
            return [taint for taint in self._kept.values() if taint.number > number]

    def of_incident(self, incident: str) -> tuple[Taint, ...]:
        """Those of one incident, in the order of their changes."""
        with self._lock:
            return tuple(taint for taint in self._kept.values() if taint.incident == incident)


def _key(message: Tainted) -> _Key:
    return *message.identity.key, message.identity.started_ns, message.number
