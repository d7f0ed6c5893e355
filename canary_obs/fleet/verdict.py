"""Is it this GPU, a link, the software, or too early to say? The same rules as alerts/templates/fleet.yml."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf, log

from canary_obs.fleet import thresholds
from canary_obs.fleet.evidence import Exposure, FleetEvidence, Release
from canary_obs.vocabulary import OTHER_PEERS


class Verdict(StrEnum):
    """What the findings of one GPU point to."""

    SUSPECT_GPU = "suspect_gpu"
    LINK = "link"
    SOFTWARE = "software"
    NOT_ENOUGH_EVIDENCE = "not_enough_evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """One GPU with findings. `expected`: what its peers' findings predict for the bytes that it verified."""

    gpu_uuid: str
    verdict: Verdict
    observed: int  # periods of six hours with new findings
    expected: float  # inf = no peer verified anything
    explained: float  # by what peers found, without the prior
    score: float  # decades by which chance is unlikely
    xids: bool
    remaps: bool
    peer: str = ""  # the other end of the link
    releases: tuple[Release, ...] = ()  # those under which it had findings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAssessment:
    """A release that carries findings on GPUs that are not suspects."""

    release: Release
    gpus: int  # with findings
    of_gpus: int
    score: float  # decades above the other releases of the engine; 0 = no other


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAssessment:
    """All GPUs with findings, the highest score first, and the suspect releases."""

    gpus: tuple[Assessment, ...]
    releases: tuple[ReleaseAssessment, ...]


@dataclass(slots=True)
class _Totals:
    verified_bytes: float = 0.0
    findings: float = 0.0  # of each GPU at most PEER_FINDINGS: one bad part must not hide another
    gpus: int = 0


def decades(observed: float, expected: float) -> float:
    """Chernoff's bound on finding as many by chance, as -log10; 0 where no more are found than expected."""
    if expected == inf or observed <= expected:
        return 0.0
    return (observed * log(observed / expected) - observed + expected) / log(10)


def assess(evidence: FleetEvidence) -> FleetAssessment:
    """Judge every GPU with findings. Bytes of 0 count as no exposure."""
    totals: dict[Release, _Totals] = defaultdict(_Totals)
    for release, others in evidence.others.items():
        totals[release] = _Totals(verified_bytes=others.verified_bytes, gpus=others.gpus)
    by_gpu: dict[str, list[Exposure]] = defaultdict(list)
    for exposure in evidence.exposures:
        by_gpu[exposure.gpu_uuid].append(exposure)
    links = _links(by_gpu, evidence)
    for exposure in evidence.exposures:
        own = totals[exposure.release]
        own.findings += _counted(exposure, links)
        if exposure.verified_bytes > 0:
            own.verified_bytes += exposure.verified_bytes
            own.gpus += 1
    found = {uuid: own for uuid, own in by_gpu.items() if any(exposure.periods for exposure in own)}
    measured = {uuid: _measure(uuid, own, totals, evidence, links) for uuid, own in found.items()}
    blamed = {uuid for uuid, first in measured.items() if first.verdict is not Verdict.NOT_ENOUGH_EVIDENCE}
    releases = _suspect_releases(evidence.exposures, totals, blamed)
    carriers = {suspect.release for suspect in releases}
    gpus = [_with_software(first, carriers) for first in measured.values()]
    gpus.sort(key=lambda gpu: (-gpu.score, -gpu.observed, gpu.gpu_uuid))
    return FleetAssessment(gpus=tuple(gpus), releases=releases)


def _counted(exposure: Exposure, links: Mapping[str, str]) -> int:
    """Findings that it adds to what its peers expect: none of a bad link."""
    return 0 if exposure.gpu_uuid in links else min(exposure.periods, thresholds.PEER_FINDINGS)


def _measure(
    uuid: str,
    own: Iterable[Exposure],
    totals: dict[Release, _Totals],
    evidence: FleetEvidence,
    links: Mapping[str, str],
) -> Assessment:
    observed, expected, explained, known = 0, 0.0, 0.0, False
    releases = []
    for exposure in own:
        observed += exposure.periods
        if exposure.periods:
            releases.append(exposure.release)
        if exposure.verified_bytes <= 0:
            continue
        known = True
        total = totals[exposure.release]
        peers = total.findings - _counted(exposure, links)
        peer_bytes = total.verified_bytes - exposure.verified_bytes
        if peer_bytes <= 0:
            expected = inf
            continue
        expected += exposure.verified_bytes * (peers + thresholds.PRIOR_FINDINGS) / peer_bytes
        explained += exposure.verified_bytes * peers / peer_bytes
    expected = expected if known else inf
    xids, remaps = uuid in evidence.xids, uuid in evidence.remaps
    score = decades(observed, expected) + thresholds.XID_SCORE * xids + thresholds.REMAP_SCORE * remaps
    verdict, peer = Verdict.NOT_ENOUGH_EVIDENCE, links.get(uuid, "")
    if peer:
        verdict = Verdict.LINK
    elif observed >= thresholds.SUSPECT_OBSERVED and (
        (expected < thresholds.SUSPECT_EXPECTED and score >= thresholds.SUSPECT_SCORE)
        or score >= thresholds.DECISIVE_SCORE
    ):
        verdict = Verdict.SUSPECT_GPU
    return Assessment(
        gpu_uuid=uuid, verdict=verdict, observed=observed, expected=expected, explained=explained,
        score=score, xids=xids, remaps=remaps, peer=peer, releases=tuple(releases),
    )  # fmt: skip


def _links(by_gpu: Mapping[str, Iterable[Exposure]], evidence: FleetEvidence) -> dict[str, str]:
    """By GPU the one peer whose blocks carry nearly all of its findings."""
    found: dict[str, str] = {}
    arrived: dict[str, int] = defaultdict(int)
    for (gpu, _), periods in evidence.transferred.items():
        arrived[gpu] += periods
    for (gpu, peer), periods in evidence.transferred.items():
        observed = sum(exposure.periods for exposure in by_gpu.get(gpu, ()))
        share = thresholds.LINK_SHARE
        enough = thresholds.SUSPECT_OBSERVED, share * observed, share * arrived[gpu]
        if peer != OTHER_PEERS and periods >= max(enough) and observed:
            found[gpu] = peer
    return found


def _suspect_releases(
    exposures: Iterable[Exposure], totals: dict[Release, _Totals], blamed: set[str]
) -> tuple[ReleaseAssessment, ...]:
    """Releases with findings on several GPUs that are not to blame themselves."""
    findings: dict[Release, float] = defaultdict(float)
    gpus: dict[Release, int] = defaultdict(int)
    for exposure in exposures:
        if exposure.periods and exposure.gpu_uuid not in blamed:
            findings[exposure.release] += min(exposure.periods, thresholds.PEER_FINDINGS)
            gpus[exposure.release] += 1
    suspects = []
    for release, number in gpus.items():
        own = totals[release]
        others = [other for other in totals if other.engine == release.engine and other != release]
        other_bytes = sum(totals[other].verified_bytes for other in others)
        other_findings = sum(findings.get(other, 0.0) for other in others)
        score = 0.0
        if other_bytes > 0 and own.verified_bytes > 0:
            expected = own.verified_bytes * (other_findings + thresholds.PRIOR_FINDINGS) / other_bytes
            score = decades(findings[release], expected)
        carries = score >= thresholds.RELEASE_SCORE or number >= thresholds.RELEASE_SHARE * own.gpus
        if number >= thresholds.RELEASE_GPUS and carries:
            suspects.append(ReleaseAssessment(release=release, gpus=number, of_gpus=own.gpus, score=score))
    return tuple(sorted(suspects, key=lambda suspect: (-suspect.score, suspect.release)))


def _with_software(gpu: Assessment, carriers: set[Release]) -> Assessment:
    if gpu.verdict is not Verdict.NOT_ENOUGH_EVIDENCE:
        return gpu
    common = gpu.explained >= thresholds.SUSPECT_EXPECTED
    if not common and not carriers.intersection(gpu.releases):
        return gpu
    return Assessment(
        gpu_uuid=gpu.gpu_uuid, verdict=Verdict.SOFTWARE, observed=gpu.observed, expected=gpu.expected,
        explained=gpu.explained, score=gpu.score, xids=gpu.xids, remaps=gpu.remaps, releases=gpu.releases,
    )  # fmt: skip
