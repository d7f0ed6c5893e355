"""What a fingerprint covers: sources sorted into bundles of one geometry, with their keys and addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import WHOLE, KVSource, Sharding
from canary_kernels.checks import KernelArgumentError
from canary_kernels.fingerprint.geometry import Geometry
from canary_kernels.fingerprint.views import BundleView, view_bundle
from canary_kernels.hashing import layer_keys, word_keys
from canary_kernels.layout import PARTIAL_WORDS, PLANE_WORDS, Part, Plane, RealData

SCRATCH_SLOTS = 1 << 16
_WORD_BYTES = 4
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Sources of one geometry, K before V."""

    geometry: Geometry
    sources: tuple[KVSource, ...]
    num_k: int
    alignment: int  # bytes that divide every address of a word run, at most 16
    table: Tensor  # int64 [2, num_sources], on the device; base addresses, layer keys
    word_keys: Tensor  # int64 [num_words], on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintPlan:
    """Built once at attach; holds what `complete_slots` and `compare_slots` need of a group's KV memory."""

    coverage: RealData
    device: torch.device
    bundles: tuple[Bundle, ...]  # empty = every fingerprint is 0
    views: tuple[BundleView, ...]  # one per bundle on the CPU, else empty
    num_slots: int | None  # slots that lie inside every source's memory; None without sources
    bytes_per_slot: int  # bytes covered; of slots spread over ranks, on average
    scratch: Tensor | None  # int64 [SCRATCH_SLOTS, 2]; sums between the launches of several bundles
    longest_row: int  # bytes of a slot in one source, the most; 0 without sources
    sharding: Sharding = WHOLE  # of all sources
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # of launches


def plan_fingerprint(
    sources: Sequence[KVSource], coverage: RealData, device: torch.device | str
) -> FingerprintPlan:
    """Sort sources into bundles and place keys and addresses on the device.

    Raises KernelArgumentError for a source whose fingerprints could not be added to those of other shards,
    that overlaps another, or that is described wrongly.
    """
    device = torch.empty(0, device=device).device  # "cuda" as "cuda:0"
    sources = tuple(sources) if coverage is not RealData.NONE else ()
    _check_sources(sources, device)
    by_geometry: dict[Geometry, list[KVSource]] = {}
    for source in sources:
        geometry = _geometry_of(source, coverage)
        if geometry.num_bytes:
            by_geometry.setdefault(geometry, []).append(source)
    bundles = tuple(_bundle(geometry, found, device) for geometry, found in by_geometry.items())
    several, sharding = len(bundles) > 1, sources[0].sharding if sources else WHOLE
    return FingerprintPlan(
        coverage=coverage,
        device=device,
        bundles=bundles,
        views=tuple(view_bundle(b.geometry, b.sources) for b in bundles) if device.type == "cpu" else (),
        num_slots=min((_capacity(source) for source in sources), default=None),
        bytes_per_slot=sum(b.geometry.num_bytes * len(b.sources) for b in bundles) // sharding.ranks,
        scratch=torch.zeros((SCRATCH_SLOTS, 2), dtype=torch.int64, device=device) if several else None,
        longest_row=max((bundle.geometry.num_bytes for bundle in bundles), default=0),
        sharding=sharding,
    )


def layer_plans(plan: FingerprintPlan) -> tuple[FingerprintPlan, ...]:
    """One plan of one bundle per layer, without planes of scales, which other tokens may share."""
    plans = []
    for bundle in plan.bundles:
        sources = [source for source in bundle.sources if source.plane is Plane.DATA]
        for layer in sorted({source.layer for source in sources}):
            held = [number for number, source in enumerate(bundle.sources) if source.layer == layer]
            if bundle.sources[held[0]].plane is not Plane.DATA:
                continue
            picked = tuple(bundle.sources[number] for number in held)
            part = replace(
                bundle,
                sources=picked,
                num_k=sum(source.part is Part.K for source in picked),
                table=bundle.table[:, held].contiguous(),
            )
            plans.append(
                replace(
                    plan,
                    bundles=(part,),
                    views=(view_bundle(part.geometry, picked),) if plan.views else (),
                    bytes_per_slot=part.geometry.num_bytes * len(picked) // plan.sharding.ranks,
                    scratch=None,
                    longest_row=part.geometry.num_bytes,
                )
            )
    return tuple(plans)


def _geometry_of(source: KVSource, coverage: RealData) -> Geometry:
    first_word = source.plane * PLANE_WORDS + source.head_start * source.head_bytes // _WORD_BYTES
    num_bytes = source.slot_bytes
    if coverage is RealData.PARTIAL:
        num_bytes = min(num_bytes, max(0, PARTIAL_WORDS - first_word) * _WORD_BYTES)
    element_bytes, element_stride = source.element_bytes, source.element_stride
    band_bytes, band_stride = source.band_bytes or source.head_bytes, source.band_stride
    head_bytes, head_stride = source.head_bytes, source.head_stride
    if element_bytes in (element_stride, band_bytes) and band_bytes < head_bytes:
        element_bytes, element_stride, band_bytes = band_bytes, band_stride, head_bytes
    if element_bytes in (element_stride, head_bytes):
        element_bytes = element_stride = band_bytes = head_bytes
        if head_stride == head_bytes or source.num_heads == 1:
            head_bytes = head_stride = source.slot_bytes
            element_bytes = element_stride = band_bytes = head_bytes
    page_size, page_stride, slot_stride = source.page_size, source.page_stride, source.slot_stride
    tile_size, tile_stride = source.tile_size or page_size, source.tile_stride
    if tile_size == page_size and page_stride == page_size * slot_stride:
        page_size, page_stride, slot_stride = 1, slot_stride, 0
    elif page_size == 1:
        slot_stride = 0
    tiled, banded = tile_size < page_size, band_bytes < head_bytes
    return Geometry(
        page_size=page_size,
        page_stride=page_stride,
        tile_size=tile_size if tiled else page_size,
        tile_stride=tile_stride if tiled else 0,
        slot_stride=slot_stride,
        head_bytes=head_bytes,
        head_stride=head_stride,
        band_bytes=band_bytes,
        band_stride=band_stride if banded else 0,
        element_bytes=element_bytes,
        element_stride=element_stride,
        first_word=first_word,
        num_bytes=num_bytes,
        sharding=source.sharding,
    )


def _bundle(geometry: Geometry, sources: list[KVSource], device: torch.device) -> Bundle:
    ordered = tuple(sorted(sources, key=lambda source: (source.part, source.layer)))
    addresses = [source.tensor.data_ptr() for source in ordered]
    units = (
        geometry.page_stride, geometry.tile_stride, geometry.slot_stride, geometry.head_bytes,
        geometry.head_stride, geometry.band_bytes, geometry.band_stride, geometry.element_bytes,
        geometry.element_stride,
    )  # fmt: skip
    keys = torch.cat([layer_keys(source.layer, 1) for source in ordered])
    return Bundle(
        geometry=geometry,
        sources=ordered,
        num_k=sum(source.part is Part.K for source in ordered),
        alignment=math.gcd(_VECTOR_BYTES, *units, *addresses),
        table=torch.stack([torch.tensor(addresses), keys]).to(device),
        word_keys=word_keys(geometry.first_word, geometry.num_words).to(device),
    )


def _capacity(source: KVSource) -> int:
    """Slots whose bytes lie inside the source's memory."""
    storage = source.tensor.untyped_storage()
    room = storage.nbytes() - (source.tensor.data_ptr() - storage.data_ptr())
    tile, band = source.tile_size or source.page_size, source.band_bytes or source.head_bytes
    extent = (source.num_heads - 1) * source.head_stride + source.element_bytes
    extent += (source.page_size // tile - 1) * source.tile_stride + (tile - 1) * source.slot_stride
    extent += (source.head_bytes // band - 1) * source.band_stride
    extent += (band // source.element_bytes - 1) * source.element_stride
    return max(0, (room - extent) // source.page_stride + 1) * source.page_size * source.sharding.ranks


def _check_sources(sources: tuple[KVSource, ...], device: torch.device) -> None:
    seen: set[tuple[Part, int, Plane, int]] = set()
    for source in sources:
        where = f"the {source.part.name} {source.plane.name} source of layer {source.layer}"
        if source.part is Part.IDENTITY or source.layer < 0 or source.head_start < 0:
            raise KernelArgumentError(
                f"{where} has part {source.part.name}, layer {source.layer}, head_start {source.head_start}; "
                "the rule is part K or V, global indices >= 0; describe the source's place in the whole model"
            )
        sizes = (
            source.num_heads,
            source.head_bytes,
            source.element_bytes,
            source.band_bytes or source.head_bytes,
            source.page_size,
            source.tile_size or source.page_size,
            source.page_stride,
        )
        strides = (
            source.tile_stride,
            source.slot_stride,
            source.head_stride,
            source.band_stride,
            source.element_stride,
        )
        if min(sizes) < 1 or min(strides) < 0 or not _divides(source):
            raise KernelArgumentError(
                f"{where} has sizes {sizes} and strides {strides}; the rule is sizes >= 1, strides >= 0, "
                "element_bytes dividing band_bytes, band_bytes head_bytes, tile_size page_size; "
                "describe another layout by several sources"
            )
        if source.head_start and source.head_bytes % _WORD_BYTES:
            raise KernelArgumentError(
                f"{where} starts at head {source.head_start} with heads of {source.head_bytes} bytes; the "
                f"rule is a multiple of {_WORD_BYTES}, or else words straddle shards and fingerprints of "
                "shards do not add up; use coverage NONE for this group"
            )
        end, limit = (source.head_start + source.num_heads) * source.head_bytes, PLANE_WORDS * _WORD_BYTES
        if end > limit:
            raise KernelArgumentError(
                f"{where} ends at byte {end} of its layer; the rule is at most {limit}, or else planes "
                "overlap; use coverage NONE for this group"
            )
        if source.tensor.device != device:
            raise KernelArgumentError(
                f"{where} is on {source.tensor.device}; the rule is the plan's device, {device}; "
                "make one plan per device"
            )
        _check_sharding(source, sources[0].sharding, where)
        place = source.part, source.layer, source.plane
        heads = {(*place, source.head_start + head) for head in range(source.num_heads)}
        if heads & seen:
            raise KernelArgumentError(
                f"{where} repeats heads {sorted(head for *_, head in heads & seen)}; the rule is that each "
                "head of a layer, part and plane is described once; drop one of the sources, set head_start, "
                "or plane SCALES for scales"
            )
        seen |= heads


def _check_sharding(source: KVSource, first: Sharding, where: str) -> None:
    sharding = source.sharding
    sound = 0 <= sharding.rank < sharding.ranks and sharding.interleave >= 1
    if sharding != first or not sound or (sharding.ranks > 1 and source.page_size % sharding.interleave):
        raise KernelArgumentError(
            f"{where} has {sharding} and pages of {source.page_size} slots, the first source {first}; the "
            "rule is one sharding for all sources, rank < ranks, interleave dividing the page; "
            "make one group each"
        )


def _divides(source: KVSource) -> bool:
    tile, band = source.tile_size or source.page_size, source.band_bytes or source.head_bytes
    return not (source.page_size % tile or source.head_bytes % band or band % source.element_bytes)
