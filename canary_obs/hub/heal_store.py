"""What healing did, as the ranks reported it, for those that follow it."""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from canary_obs.heals import Heal
from canary_obs.hub.incident_store import IncidentStore
from canary_obs.records import Heals, Identity

HEALS_KEPT = 2048


class HealEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One action of healing. `number` counts them from 1 since the service started."""

    number: int
    incident: str | None  # id; None = it was not done about a finding
    identity: Identity
    heal: Heal


class HealStore:
    """Bounded: the latest ones. Thread-safe."""

    def __init__(self, incidents: IncidentStore) -> None:
        """`incidents` get those that were done about them."""
        self._incidents, self._lock = incidents, threading.Lock()
        self._kept: deque[HealEvent] = deque(maxlen=HEALS_KEPT)
        self.total = 0

    def add(self, message: Heals) -> None:
        """File what a rank reports, under the ids of incidents here."""
        for heal in message.rows:
            incident = None
            if heal.incident is not None:
                incident = self._incidents.id_for(message.identity, heal.incident)
                self._incidents.add_heal(incident, heal)
            with self._lock:
                self.total += 1
                event = HealEvent(number=self.total, incident=incident, identity=message.identity, heal=heal)
                self._kept.append(event)

    def after(self, number: int) -> list[HealEvent]:
        """The kept ones with a higher number, in order."""
        with self._lock:
            newer: list[HealEvent] = []
            for event in reversed(self._kept):
                if event.number <= number:
                    break
                newer.append(event)
            return newer[::-1]
