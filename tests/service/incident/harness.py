"""Incidents with chosen findings and evidence."""

from __future__ import annotations

from typing import Any

import msgspec

from canary_obs.hub.hub import Hub
from canary_obs.hub.incidents import Incident
from canary_obs.records import Evidence, Violation, Violations
from canary_obs.slot_facts import ChangedWord, SlotEvent, SlotFacts
from canary_obs.vocabulary import Part, Phase, Reason, SlotEventKind, SlotState
from tests.service.fakes import hello, identity, violation

WHO = identity(0)
SLOT, STEP = 1026, 50


def row(reason: Reason, **changes: Any) -> Violation:
    plain = {
        "reason": reason, "phase": Phase.TAIL, "part": None, "slot": SLOT, "step": STEP, "position": 158,
        "request": "r000002", "expected": None, "actual": None,
    }  # fmt: skip
    return violation(**plain | changes)


def facts(slot: int = SLOT, **changes: Any) -> SlotFacts:
    plain = SlotFacts(
        slot=slot, state=SlotState.COMPLETE, position=121, recorded={Part.K: "0x1"}, found={Part.K: "0x1"}
    )
    return msgspec.structs.replace(plain, **changes)


def written(step: int, *requests: str) -> SlotEvent:
    return SlotEvent(kind=SlotEventKind.WRITTEN, step=step, requests=requests)


def changed(original: str, current: str, dtype: str = "float32", **changes: Any) -> ChangedWord:
    plain = ChangedWord(
        part=Part.K, layer=1, head=0, element=2, dtype=dtype, word=2, original=original, current=current
    )
    return msgspec.structs.replace(plain, **changes)


def evidence(**changes: Any) -> Evidence:
    plain = Evidence(
        identity=WHO, incident="", group="full", step=STEP + 1, time_ns=1, prompted=False, slot=facts(),
        changed=(), neighbours=(), history=(written(30, "r000005", "r000007"),), writes_known=True,
        holders=("r000005",),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def incident_of(*rows: Violation, seen: tuple[Evidence, ...] = ()) -> Incident:
    """The incident that a hub makes of these findings and their evidence."""
    hub = Hub()
    return hub_with(hub, *rows, seen=seen)


def hub_with(hub: Hub, *rows: Violation, seen: tuple[Evidence, ...] = ()) -> Incident:
    hub.ingest(hello(WHO), lambda command: None)
    hub.ingest(Violations(identity=WHO, rows=rows), lambda command: None)
    name = hub.incidents.newest_first()[0].id
    for one in seen:
        hub.ingest(msgspec.structs.replace(one, incident=name), lambda command: None)
    found = hub.incidents.find(name)
    assert found is not None
    return found
