"""A week of a fleet as counters: what Prometheus would have scraped, and what the code is given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from canary_obs.fleet.evidence import Exposure, FleetEvidence, Release

MINUTES = 10  # between samples
HOURS = 169  # the last is judged over the 168 before
PERIOD = 6  # hours
SAMPLES = HOURS * 60 // MINUTES + 1
RELEASE = Release("vllm", "1.0", "llama@1")


def hour(sample: int) -> int:
    """The hour, by its end, that a sample's increase is counted in."""
    return ceil(sample * MINUTES / 60)


def period(sample: int) -> int:
    """The period of six hours that a sample's increase is counted in."""
    return ceil(hour(sample) / 6)


def counted(hours: list[int]) -> list[int]:
    """Of hours with findings by their number, sorted, one per period that counts as a finding.

    A period counts when findings begin in it after an hour without; when they only go on, from the second on.
    """
    begun: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, at in enumerate(hours):
        first.setdefault(at // PERIOD, at)
        if place == 0 or hours[place - 1] != at - 1:
            begun.setdefault(at // PERIOD, at)
    going_on = {
        own: at for own, at in first.items() if own not in begun and own - 1 in first and own - 1 not in begun
    }
    return sorted((begun | going_on).values())


@dataclass(slots=True, kw_only=True)
class Gpu:
    """One GPU. `findings`: samples at which new ones show; `rate`: bytes verified per sample."""

    uuid: str
    release: Release = RELEASE
    node: str = "n1"
    rate: float = 6000.0
    findings: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()  # per finding the peer whose block it was; () = no transfers
    xid: int = 0
    remaps: bool = False
    resets: tuple[int, ...] = ()  # samples at which the counters begin again
    driver: str = "580.95.05"
    changes: int = 0  # sample from which on it has `new_node` and `new_driver`; 0 = never
    new_node: str = ""  # "" = the same as before
    new_driver: str = ""
    per_finding: int = 1  # slots that a finding damages

    @property
    def last_node(self) -> str:
        """Where it is at the end."""
        return (self.changes and self.new_node) or self.node

    @property
    def periods(self) -> set[int]:
        """Periods of six hours that count as findings, as judged at the end."""
        hours = sorted({hour(at) - 1 for at in self.findings})
        return {at // PERIOD for at in counted(hours)}


@dataclass(slots=True, kw_only=True)
class History:
    """A fleet's week."""

    gpus: list[Gpu] = field(default_factory=list)

    def evidence(self) -> FleetEvidence:
        """As the code takes it: bytes of 168 hours, and hours with findings."""
        per_hour = 60 // MINUTES
        transferred: dict[tuple[str, str], int] = {}
        for gpu in self.gpus:
            for peer in set(gpu.peers):
                at = {period(when) for when, own in zip(gpu.findings, gpu.peers, strict=True) if own == peer}
                transferred[gpu.uuid, peer] = len(at)
        return FleetEvidence(
            exposures=tuple(
                Exposure(
                    gpu_uuid=gpu.uuid,
                    release=gpu.release,
                    verified_bytes=gpu.rate * per_hour * 168,
                    periods=len(gpu.periods),
                )
                for gpu in self.gpus
            ),
            xids=frozenset(gpu.uuid for gpu in self.gpus if gpu.xid in (48, 63, 94)),
            remaps=frozenset(gpu.uuid for gpu in self.gpus if gpu.remaps),
            transferred=transferred,
        )

    def series(self) -> list[dict[str, str]]:
        """The input of promtool's unit tests."""
        return [
            {"series": name, "values": values}
            for number, gpu in enumerate(self.gpus)
            for name, values in _series(number, gpu)
        ]


def _series(number: int, gpu: Gpu) -> Iterator[tuple[str, str]]:
    rank = f'engine="{gpu.release.engine}",instance="i{number}",rank="0",job="kv-canary"'
    versions = f'engine_version="{gpu.release.engine_version}",model="{gpu.release.model}"'
    info = f'kv_canary_rank_info{{{rank},{versions},mode="log",gpu_uuid="{gpu.uuid}"'
    before = f'{info},node="{gpu.node}",driver_version="{gpu.driver}"}}'
    if gpu.changes:
        driver = gpu.new_driver or gpu.driver
        yield before, f"1x{gpu.changes - 1} stale"
        after = f'{info},node="{gpu.last_node}",driver_version="{driver}"}}'
        yield after, f"_x{gpu.changes} 1x{SAMPLES - gpu.changes}"
    else:
        yield before, f"1x{SAMPLES}"
    count, values = 0, []
    for at in range(SAMPLES):
        count = 0 if at in gpu.resets else count
        count += gpu.per_finding * (at in gpu.findings)
        values.append(str(count))
    labels = f'{rank},group="full",phase="patrol",reason="kv_data"'
    yield f"kv_canary_violations_total{{{labels}}}", " ".join(values)
    other = labels.replace("kv_data", "chain")
    yield f"kv_canary_violations_total{{{other}}}", f"0+1x{SAMPLES}"
    yield f'kv_canary_bytes_verified_total{{{rank},group="full",phase="patrol"}}', f"0+{gpu.rate:g}x{SAMPLES}"
    for peer in sorted(set(gpu.peers)):
        count, values = 0, []
        for at in range(SAMPLES):
            count += at in gpu.findings and gpu.peers[gpu.findings.index(at)] == peer
            values.append(str(count))
        yield f'kv_canary_transferred_findings_total{{{rank},peer="{peer}"}}', " ".join(values)
    yield from _device_series(gpu)


def _device_series(gpu: Gpu) -> Iterator[tuple[str, str]]:
    if gpu.xid:
        name = "DCGM_FI_DEV_XID_ERRORS" if gpu.uuid.endswith("0") else "DCGM_FI_DEV_XID_ERROR"
        yield f'{name}{{UUID="{gpu.uuid}",gpu="0"}}', f"{gpu.xid}x{SAMPLES}"
    if gpu.remaps:
        yield f'kv_canary_device_remap_pending{{gpu_uuid="{gpu.uuid}"}}', f"0x{SAMPLES}"
        yield f'kv_canary_device_remap_failed{{gpu_uuid="{gpu.uuid}"}}', f"1x{SAMPLES}"


def random_history(seed: int) -> History:
    """GPUs of a few releases, most without findings, some bad, some links, exposures 100 fold apart."""
    draw = random.Random(seed)
    releases = [
        Release(engine, version, model)
        for engine in ("vllm", "sglang")
        for version in ("1.0", "1.1")
        for model in ("llama@1", "")
    ]
    releases = draw.sample(releases, draw.randint(1, 4))
    buggy = {release: draw.choice((0.0, 0.0, 0.1, 0.6)) for release in releases}
    gpus = []
    for number in range(draw.choice((1, 4, 12, 40))):
        release = draw.choice(releases)
        bad = draw.random() < 0.08
        count = draw.randint(3, 12) if bad else int(draw.random() < buggy[release]) * draw.randint(1, 4)
        findings = tuple(sorted(draw.sample(range(1, 6 * 168), count)))
        if findings and draw.random() < 0.4:  # that go on for some hours
            findings = tuple(sorted({*findings, *range(findings[0], min(findings[0] + 100, 6 * 168), 6)}))
        gpus.append(
            Gpu(
                uuid=f"GPU-{number:04d}",
                release=release,
                rate=float(draw.choice((600, 3000, 6000, 60000))),
                findings=findings,
                peers=tuple(draw.choice(("p1", "p1", "p1", "p2")) for _ in findings) * (draw.random() < 0.3),
                xid=draw.choice((0, 0, 0, 31, 48, 94)),
                remaps=draw.random() < 0.1,
                per_finding=draw.choice((1, 1000)),
            )
        )
    return History(gpus=gpus)


def rule_test(name: str, history: History, checks: dict[str, Any]) -> dict[str, Any]:
    """One unit test for promtool, judged at the end of the week."""
    return {"name": name, "interval": f"{MINUTES}m", "input_series": history.series(), **checks}
