"""What is known of a fleet's GPUs over the last seven days, as the recorded series have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Release(NamedTuple):
    """What software a GPU ran; peers are the GPUs of the same release."""

    engine: str
    engine_version: str
    model: str

    def __str__(self) -> str:
        return f"{self.engine} {self.engine_version} with {self.model or 'an unknown model'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One GPU under one release. `periods`: of six hours, those with new kv_data findings.

    A burst is one finding: a bug that damages a thousand slots in an hour says no more than one slot does.
    """

    gpu_uuid: str
    release: Release
    verified_bytes: float
    periods: int = 0


class Others(NamedTuple):
    """GPUs of a release that have no findings, together."""

    verified_bytes: float
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvidence:
    """`exposures`: of GPUs with findings at least; `others`: those that are not among them.

    `xids`: GPUs with a memory Xid (48, 63, 94); `remaps`: with a new or pending row remap; `transferred`:
    periods with findings in blocks that came from a peer, by (GPU, peer).
    """

    exposures: tuple[Exposure, ...]
    others: Mapping[Release, Others] = field(default_factory=dict)
    xids: frozenset[str] = frozenset()
    remaps: frozenset[str] = frozenset()
    transferred: Mapping[tuple[str, str], int] = field(default_factory=dict)
