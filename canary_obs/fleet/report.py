"""The table of suspects: each GPU with findings, what they point to, why, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isinf

import msgspec

from canary_obs.fleet import thresholds
from canary_obs.fleet.evidence import FleetEvidence
from canary_obs.fleet.prometheus import GpuPlace
from canary_obs.fleet.verdict import Assessment, FleetAssessment, Verdict
from canary_obs.vocabulary import HOST_PEER, UNKNOWN_PEER

_NEXT = {
    Verdict.SUSPECT_GPU: "drain it, reset it; findings come back: return it (RMA)",
    Verdict.LINK: "look at the NIC, the cable and the peer before the GPU",
    Verdict.SOFTWARE: "go back to the release before",
    Verdict.NOT_ENOUGH_EVIDENCE: "wait: the evidence is not enough",
}


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of the report. `expected` None = no peers."""

    gpu_uuid: str
    node: str
    pci_bus_id: str
    gpu_model: str
    driver_version: str
    verdict: str
    score: float
    observed: int
    expected: float | None
    reasons: tuple[str, ...]
    next_step: str


class ReleaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A suspect release."""

    engine: str
    engine_version: str
    model: str
    gpus: int
    of_gpus: int
    reasons: tuple[str, ...]


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `canary-obs fleet report` prints."""

    judged_gpus: int
    gpus: tuple[GpuRow, ...]
    releases: tuple[ReleaseRow, ...]


def fleet_report(
    evidence: FleetEvidence, found: FleetAssessment, places: Mapping[str, GpuPlace]
) -> FleetReport:
    """Rows of all GPUs with findings, the highest score first."""
    exposed = {exposure.gpu_uuid for exposure in evidence.exposures}
    links_to = Counter(gpu.peer for gpu in found.gpus)
    return FleetReport(
        judged_gpus=len(exposed) + sum(others.gpus for others in evidence.others.values()),
        gpus=tuple(
            _row(gpu, places.get(gpu.gpu_uuid, GpuPlace()), links_to[gpu.peer]) for gpu in found.gpus
        ),
        releases=tuple(
            ReleaseRow(
                engine=suspect.release.engine, engine_version=suspect.release.engine_version,
                model=suspect.release.model, gpus=suspect.gpus, of_gpus=suspect.of_gpus,
                reasons=(
                    f"findings on {suspect.gpus} of {suspect.of_gpus} GPUs that are no suspects themselves",
                    f"{suspect.score:.1f} decades above the engine's other releases"
                    if suspect.score
                    else "no other release to compare with, or no more findings there",
                ),
            )
            for suspect in found.releases
        ),
    )  # fmt: skip


def _row(gpu: Assessment, place: GpuPlace, links: int) -> GpuRow:
    """links: GPUs whose findings come from the same peer as this one's."""
    return GpuRow(
        gpu_uuid=gpu.gpu_uuid, node=place.node, pci_bus_id=place.pci_bus_id, gpu_model=place.gpu_model,
        driver_version=place.driver_version, verdict=gpu.verdict.value, score=gpu.score,
        observed=gpu.observed, expected=None if isinf(gpu.expected) else gpu.expected,
        reasons=tuple(_reasons(gpu, links)), next_step=_next_step(gpu, links),
    )  # fmt: skip


def _next_step(gpu: Assessment, links: int) -> str:
    if gpu.verdict is Verdict.LINK and gpu.peer == HOST_PEER:
        return "look at the host's memory and the PCIe slot before the GPU"
    if gpu.verdict is Verdict.LINK and gpu.peer != UNKNOWN_PEER and links > 1:
        return f"look at {gpu.peer} first: what others got from it is damaged, too"
    return _NEXT[gpu.verdict]


def _reasons(gpu: Assessment, links: int) -> list[str]:
    peers = "no peers to compare with" if isinf(gpu.expected) else f"peers predict {gpu.expected:.3g}"
    found = [f"findings in {gpu.observed} periods of six hours, {peers}"]
    if gpu.xids:
        found.append("its driver reported a memory Xid (48, 63 or 94)")
    if gpu.remaps:
        found.append("rows of its memory were remapped, or wait for it")
    if gpu.verdict is Verdict.LINK:
        found.append(_source(gpu.peer))
        if gpu.peer not in (HOST_PEER, UNKNOWN_PEER) and links > 1:
            found.append(f"{links} GPUs get damaged blocks from this peer")
    if gpu.verdict is Verdict.NOT_ENOUGH_EVIDENCE:
        found += _missing(gpu)
    return found


def _source(peer: str) -> str:
    if peer == HOST_PEER:
        return "nearly all in blocks that came back damaged from the host's memory"
    named = "peers that the engine does not name" if peer == UNKNOWN_PEER else f"the peer {peer}"
    return f"nearly all in blocks that arrived damaged from {named}"


def _missing(gpu: Assessment) -> list[str]:
    if gpu.observed < thresholds.SUSPECT_OBSERVED:
        return [f"{thresholds.SUSPECT_OBSERVED} periods are needed"]
    if gpu.expected >= thresholds.SUSPECT_EXPECTED:
        return ["its peers verified too few bytes to say what is usual"]
    return [f"a score of {thresholds.SUSPECT_SCORE:g} is needed, it has {gpu.score:.1f}"]
