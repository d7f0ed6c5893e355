"""How each metric of the service itself is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from canary_obs.devices.health import DeviceHealth
from canary_obs.hub.counters import HubCounts
from canary_obs.hub.drills import DrillCount
from canary_obs.hub.incidents import trace_id_of
from canary_obs.hub.ranks import RankView
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.records import RankKey
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.readings import Reading, by_name, one, one_hot
from canary_obs.vocabulary import DrillOutcome, State

# Every part starts at 0: increase() misses a series that is first seen at 1.
SERVICE_PARTS = (
    "zmq_listener", "local_listener", "violation_log", "audit_log", "tracing", "metric_export", "devices",
    "state_file", "tokens_file",
)  # fmt: skip
REQUEST_LENGTH = 64  # of a request's id in a label: clients choose it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """The values that the service's own metrics are read from."""

    version: str
    state: State
    ranks: tuple[RankView, ...]
    missing: Mapping[tuple[str, str], tuple[int, ...]]  # ranks by (engine, instance)
    counts: HubCounts
    open_findings: tuple[ViolationEvent, ...]  # IncidentStore.open_findings
    incidents_opened: int
    drills: Mapping[RankKey, DrillCount] | None  # None = drills are disabled
    exports: Mapping[str, ExportCounts]  # by enabled signal
    changed_bits: Mapping[tuple[RankKey, int, str], int]
    transferred: Mapping[tuple[RankKey, str], int]
    devices: tuple[DeviceHealth, ...]  # GPUs of this node
    log_dropped: int
    scrape_seconds: float | None  # of the previous scrape; None = first scrape
    scrape_errors: int


def build_info(service: ServiceView) -> Iterator[Reading]:
    yield (service.version,), 1.0


def service_state(service: ServiceView) -> Iterator[Reading]:
    return one_hot(service.state)


def ranks_by_state(service: ServiceView) -> Iterator[Reading]:
    for name in State:
        yield (name.value,), float(sum(rank.state is name for rank in service.ranks))


def ranks_missing(service: ServiceView) -> Iterator[Reading]:
    for labels, missing in service.missing.items():
        yield labels, float(len(missing))


def hub_messages(service: ServiceView) -> Iterator[Reading]:
    return by_name(service.counts.messages)


def hub_refused(service: ServiceView) -> Iterator[Reading]:
    return one(service.counts.refused)


def hub_invalid(service: ServiceView) -> Iterator[Reading]:
    return by_name(service.counts.invalid)


def hub_undecodable(service: ServiceView) -> Iterator[Reading]:
    return one(service.counts.undecodable)


def hub_handshakes(service: ServiceView) -> Iterator[Reading]:
    return by_name(service.counts.handshakes)


def hub_evicted(service: ServiceView) -> Iterator[Reading]:
    return one(service.counts.evicted)


def hub_expired(service: ServiceView) -> Iterator[Reading]:
    return one(service.counts.expired)


def service_faults(service: ServiceView) -> Iterator[Reading]:
    return by_name(dict.fromkeys(SERVICE_PARTS, 0) | service.counts.faults)


def log_dropped(service: ServiceView) -> Iterator[Reading]:
    return one(service.log_dropped)


def scrape_duration(service: ServiceView) -> Iterator[Reading]:
    return one(service.scrape_seconds)


def scrape_errors(service: ServiceView) -> Iterator[Reading]:
    return one(service.scrape_errors)


def incidents_opened(service: ServiceView) -> Iterator[Reading]:
    return one(service.incidents_opened)


def incident_info(service: ServiceView) -> Iterator[Reading]:
    # One series per rank, as alerts join on the rank and old ids must not accumulate. What is said of the
    # incident is of its first violation, so the series stays the same while the incident lasts.
    for event in service.open_findings:
        engine, instance, rank = event.identity.key
        row = event.violation
        yield (
            engine, instance, str(rank), event.incident, trace_id_of("incident", event.incident),
            row.reason.value, row.phase.value, row.group, str(row.slot),
            "" if row.position is None else str(row.position), (row.request or "")[:REQUEST_LENGTH],
        ), 1.0  # fmt: skip


def changed_bits(service: ServiceView) -> Iterator[Reading]:
    for ((engine, instance, rank), bit, direction), count in service.changed_bits.items():
        yield (engine, instance, str(rank), str(bit), direction), float(count)


def transferred(service: ServiceView) -> Iterator[Reading]:
    for ((engine, instance, rank), peer), count in service.transferred.items():
        yield (engine, instance, str(rank), peer), float(count)


def drills(service: ServiceView) -> Iterator[Reading]:
    for rank, count in _drills(service):
        for outcome in DrillOutcome:
            yield (*rank, outcome.value), float(count.outcomes.get(outcome, 0))


def drill_detected(service: ServiceView) -> Iterator[Reading]:
    for rank, count in _drills(service):
        if count.detected_ns is not None:
            yield rank, count.detected_ns / 1e9


def _drills(service: ServiceView) -> Iterator[tuple[tuple[str, str, str], DrillCount]]:
    if service.drills is not None:
        for rank in service.ranks:
            engine, instance, number = rank.identity.key
            yield (engine, instance, str(number)), service.drills.get(rank.identity.key, DrillCount())


def exported(service: ServiceView) -> Iterator[Reading]:
    for signal, counts in service.exports.items():
        yield (signal,), float(counts.exported)


def export_dropped(service: ServiceView) -> Iterator[Reading]:
    for signal, counts in service.exports.items():
        yield (signal, "queue_full"), float(counts.queue_full)
        yield (signal, "export_failed"), float(counts.failed)
