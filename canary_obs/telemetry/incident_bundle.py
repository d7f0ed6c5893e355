"""The incident bundle: everything known about an incident as one JSON document, readable offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from canary_obs import __version__
from canary_obs.bit_statistics import BitStatistics, WordAt, bit_statistics
from canary_obs.errors import ConfigurationError
from canary_obs.hub.incidents import Incident
from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.hub.taint_store import Taint
from canary_obs.records import Hello

if TYPE_CHECKING:
    from canary_obs.hub.hub import Hub

FORMAT: Literal["canary_obs.incident/1"] = "canary_obs.incident/1"


class IncidentBundle(msgspec.Struct, frozen=True, kw_only=True):
    """The incident, the ranks that reported it (versions, settings, device), and the sweeps that found it."""

    format: Literal["canary_obs.incident/1"]
    generated_ns: int
    service_version: str
    incident: Incident
    ranks: tuple[Hello, ...]  # of the incident's ranks, as they are attached now
    sweeps: tuple[SweepRecord, ...]
    tainted: tuple[Taint, ...] = ()  # requests that read its damage, by damage (absent in older bundles)
    bits: BitStatistics | None = None  # over its evidence; None = there is none (absent in older bundles)


def build_bundle(hub: Hub, incident_id: str) -> IncidentBundle | None:
    """The bundle of an incident; None = the hub does not keep it."""
    incident = hub.incidents.find(incident_id)
    if incident is None:
        return None
    ranks = {(incident.engine, incident.instance, rank) for rank in incident.ranks}
    sweeps = (hub.sweep(sweep_id) for sweep_id in incident.sweeps)
    return IncidentBundle(
        format=FORMAT,
        generated_ns=time.time_ns(),
        service_version=__version__,
        incident=incident,
        ranks=tuple(rank.hello for rank in hub.ranks() if rank.identity.key in ranks and rank.hello),
        sweeps=tuple(sweep for sweep in sweeps if sweep is not None),
        tainted=hub.taints.of_incident(incident.id),
        bits=_bits(incident),
    )


def _bits(incident: Incident) -> BitStatistics | None:
    words = [
        WordAt(f"rank {own.identity.rank} {own.group}", own.slot.slot, word)
        for own in incident.evidence
        for word in own.changed
    ]
    return bit_statistics(words) if words else None


def read_bundle(path: Path) -> IncidentBundle:
    """Read a saved response of GET /canary/incidents/{id}. Raises ConfigurationError."""
    remedy = "Save the response of GET /canary/incidents/{id} and name that file."
    try:
        return msgspec.json.decode(path.read_bytes(), type=IncidentBundle)
    except OSError as error:
        raise ConfigurationError("FILE", str(path), f"cannot be read: {error.strerror}", remedy) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError("FILE", str(path), f"is not an incident bundle: {error}", remedy) from None


def bundle_of(content: object) -> IncidentBundle:
    """A service's answer, as decoded JSON. Raises ConfigurationError where it is none of this release."""
    try:
        return msgspec.convert(content, IncidentBundle)
    except msgspec.ValidationError as error:
        rule = f"the service's answer is no incident bundle of this release: {error}"
        raise ConfigurationError(
            "--url", "its incident", rule, "Use the same release on both sides."
        ) from None
