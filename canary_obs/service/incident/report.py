"""An incident as its page shows it: sentence, causes, commands, timeline, damage map, slots, requests."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from canary_obs.hub.hub import Hub
from canary_obs.hub.incidents import Incident, IncidentSummary
from canary_obs.hub.taint_store import Taint
from canary_obs.records import Evidence
from canary_obs.service.incident.causes import LikelyCause, likely_causes
from canary_obs.service.incident.readers import note_of
from canary_obs.service.incident.sentence import sentence_of
from canary_obs.service.incident.timeline import Moment, timeline_of
from canary_obs.vocabulary import Part, SlotState, State, worst

_CURL = 'curl -H "Authorization: Bearer $TOKEN"'
_RUNBOOK = "KVCanaryDamage.md"  # of the alert that incidents page with


class DamagedWord(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the damage map: one changed word."""

    rank: int
    group: str
    slot: int
    part: Part
    layer: int
    head: int
    element: int
    bits: int | None  # that differ; None = its values are gone


class DamageMap(msgspec.Struct, frozen=True, kw_only=True):
    """Layers x heads with the changed words. `layers` None = not known; `unexplained` slots have no word."""

    layers: int | None
    words: tuple[DamagedWord, ...]
    unexplained: tuple[int, ...]


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """A slot of the neighbourhood. `intact` None = nothing to compare; `state` None = damaged record."""

    slot: int
    state: SlotState | None
    position: int
    intact: bool | None
    found: bool  # a finding of this incident names it


class Neighbourhood(msgspec.Struct, frozen=True, kw_only=True):
    """A slot with those around it, as they were read."""

    rank: int
    group: str
    slot: int
    step: int
    late: bool  # read on command only: it may have changed since
    users: tuple[str, ...]
    slots: tuple[SlotView, ...]


class NextCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and why."""

    why: str
    command: str


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The incident's page. `injected` None = no rank of it is known to inject faults."""

    incident: IncidentSummary
    sentence: str
    injected: str | None
    state: State | None  # worst of its ranks now; None = they are gone
    causes: tuple[LikelyCause, ...]
    commands: tuple[NextCommand, ...]
    runbook: str | None  # its address; None = the setting runbook_base is empty
    timeline: tuple[Moment, ...]
    damage: DamageMap
    neighbourhoods: tuple[Neighbourhood, ...]
    requests: tuple[str, ...]  # that findings name, or that used the slots when they were read
    requests_note: str
    tainted: tuple[Taint, ...]  # who read its damage, by damage
    devices: tuple[str, ...]
    newest: int | None  # number of its newest kept finding


def build_report(hub: Hub, incident_id: str, runbook_base: str = "") -> IncidentReport | None:
    """The report of an incident; None = the hub does not keep it."""
    incident = hub.incidents.find(incident_id)
    if incident is None:
        return None
    events, tainted = (*incident.first, *incident.latest), hub.taints.of_incident(incident.id)
    ranks = [rank for rank in hub.ranks() if rank.identity.key in _keys(incident)]
    layers = [info.layers for rank in ranks if rank.hello for info in rank.hello.groups]
    states = [rank.state for rank in ranks]
    return IncidentReport(
        incident=_summary(incident),
        sentence=sentence_of(incident),
        injected=_injected(hub, incident),
        state=worst(states) if states else None,
        causes=likely_causes(incident),
        commands=_commands(incident),
        runbook=f"{runbook_base.rstrip('/')}/{_RUNBOOK}" if runbook_base else None,
        timeline=timeline_of(incident, hub.sweeps()),
        damage=_damage_map(incident.evidence, max(layers) if layers else None),
        neighbourhoods=tuple(_neighbourhood(incident, evidence) for evidence in incident.evidence),
        requests=_requests(incident),
        requests_note=note_of(tainted),
        tainted=tainted,
        devices=tuple(sorted({event.identity.device for event in events})),
        newest=max((event.number for event in events), default=None),
    )


def _keys(incident: Incident) -> set[tuple[str, str, int]]:
    return {(incident.engine, incident.instance, rank) for rank in incident.ranks}


def _summary(incident: Incident) -> IncidentSummary:
    names = IncidentSummary.__struct_fields__
    return IncidentSummary(**{name: getattr(incident, name) for name in names})


def _injected(hub: Hub, incident: Incident) -> str | None:
    counts = [
        (rank.identity.rank, sum(count.injected for count in rank.totals.perturbations.values()))
        for rank in hub.ranks()
        if rank.identity.key in _keys(incident) and rank.totals is not None
    ]
    injecting = [f"rank {rank} has injected {count}" for rank, count in counts if count]
    if not injecting:
        return None
    return (
        f"Faults are injected on purpose here ({', '.join(injecting)}, setting KV_CANARY_PERTURB): "
        "this incident may be one of them."
    )


def _damage_map(evidence: Iterable[Evidence], layers: int | None) -> DamageMap:
    words: list[DamagedWord] = []
    unexplained = []
    for one in evidence:
        if one.slot.intact is False and not one.changed:
            unexplained.append(one.slot.slot)
        for word in one.changed:
            known = word.original is not None and word.current is not None
            bits = (int(word.original or "0", 16) ^ int(word.current or "0", 16)).bit_count()
            words.append(
                DamagedWord(
                    rank=one.identity.rank, group=one.group, slot=one.slot.slot, part=word.part,
                    layer=word.layer, head=word.head, element=word.element, bits=bits if known else None,
                )
            )  # fmt: skip
    return DamageMap(layers=layers, words=tuple(words), unexplained=tuple(unexplained))


def _neighbourhood(incident: Incident, evidence: Evidence) -> Neighbourhood:
    events = (*incident.first, *incident.latest)
    found = {
        event.violation.slot
        for event in events
        if event.identity == evidence.identity and event.violation.group == evidence.group
    }
    slots = sorted((evidence.slot, *evidence.neighbours), key=lambda slot: slot.slot)
    return Neighbourhood(
        rank=evidence.identity.rank,
        group=evidence.group,
        slot=evidence.slot.slot,
        step=evidence.step,
        late=evidence.prompted,
        users=evidence.holders,
        slots=tuple(
            SlotView(
                slot=slot.slot, state=slot.state, position=slot.position, intact=slot.intact,
                found=slot.slot in found,
            )
            for slot in slots
        ),
    )  # fmt: skip


def _requests(incident: Incident) -> tuple[str, ...]:
    events = (*incident.first, *incident.latest)
    named = [event.violation.request for event in events if event.violation.request]
    held = [request for evidence in incident.evidence for request in evidence.holders]
    return tuple(dict.fromkeys((*named, *held)))


def _commands(incident: Incident) -> tuple[NextCommand, ...]:
    body = f'{{"incident": "{incident.id}"}}'
    json = '-H "Content-Type: application/json"'
    return (
        NextCommand(
            why="See how far the damage reaches: check every cached slot now.",
            command=f'{_CURL} -X POST "$URL/canary/sweep?wait=true"',
        ),
        NextCommand(
            why="Keep the bundle, and read it in a terminal, also offline.",
            command=f'{_CURL} "$URL/canary/incidents/{incident.id}" > incident.json && '
            "canary-obs incident show incident.json",
        ),
        NextCommand(
            why="Acknowledge it once it is dealt with.",
            command=f"{_CURL} {json} -d '{body}' \"$URL/canary/acknowledge\"",
        ),
    )
