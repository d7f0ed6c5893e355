"""Layouts detected by probe writes, for backends made up here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from canary_kernels.layout import Part
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.placement import LayerWrite, find_placements

PAGES, SIZE, HEADS, DIM = 4, 8, 2, 6


def layer(cache: torch.Tensor, write: Any, dtype: torch.dtype = torch.float32) -> LayerWrite:
    shapes = {Part.K: (HEADS, DIM), Part.V: (HEADS, DIM)}
    return LayerWrite(
        name="made up", cache=cache, page_size=SIZE, shapes=shapes, dtype=dtype, write=write
    )  # fmt: skip


def together(cache: torch.Tensor) -> Any:
    """[pages, heads, slots, K|V]."""

    def write(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        joined = torch.cat([parts[Part.K], parts[Part.V]], -1).to(cache.dtype)
        cache[slots // SIZE, :, slots % SIZE] = joined

    return write


def transposed(cache: torch.Tensor) -> Any:
    """K as [elements, slots] and V as [slots, elements] in one page."""
    keys, values = cache.chunk(2, dim=2)

    def write(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        for index, slot in enumerate(slots.tolist()):
            page = keys[slot // SIZE].view(HEADS, DIM, SIZE)
            page[:, :, slot % SIZE] = parts[Part.K][index].to(cache.dtype)
            values[slot // SIZE, :, slot % SIZE] = parts[Part.V][index].to(cache.dtype)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_any_order_of_axes_and_any_width(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    sizes = (PAGES, HEADS, SIZE, 2 * DIM)
    plain = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    cache = plain.permute([order.index(axis) for axis in range(4)])
    before = plain.view(torch.uint8).clone()
    found = find_placements(layer(cache, together(cache)))
    width = plain.element_size()
    offsets = torch.arange(plain.numel()).view(plain.shape) * width
    offsets = offsets.permute([order.index(axis) for axis in range(4)])
    for place, start in zip(found, (0, DIM), strict=True):
        for slot in (0, 5, 2 * SIZE + 3, PAGES * SIZE - 1):
            expected = offsets[slot // SIZE, :, slot % SIZE, start : start + DIM]
            expected = (expected[..., None] + torch.arange(width)).flatten(1)
            assert torch.equal(place.offset(slot), expected)
    assert torch.equal(plain.view(torch.uint8), before)


def test_elements_apart() -> None:
    cache = torch.zeros(PAGES, HEADS, 2 * SIZE, DIM)
    keys, values = find_placements(layer(cache, transposed(cache)))
    assert (keys.element_bytes, keys.element_stride, keys.slot_stride) == (4, 4 * SIZE, 4)
    assert (values.element_bytes, values.slot_stride) == (4 * DIM, 4 * DIM)


def in_tiles(tensor: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a cache [pages, heads, 2 * slots * elements] in the tiles of a CPU's matrix unit.

    K: [pages, heads, tiles, pairs, tile, pair]; V: [pages, heads, bands, slot pairs, band, slot pair].
    """
    keys, values = tensor.chunk(2, dim=2)
    pairs = values.unflatten(2, (DIM // 2, SIZE // 2, 2, 2))
    return keys.unflatten(2, (SIZE // tile, DIM // 2, tile, 2)), pairs


def tiled(cache: torch.Tensor, tile: int = 4) -> Any:
    keys, values = in_tiles(cache, tile)

    def write(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        for index, slot in enumerate(slots.tolist()):
            page, at = divmod(slot, SIZE)
            key, value = parts[Part.K][index], parts[Part.V][index]
            keys[page, :, at // tile, :, at % tile] = key.unflatten(1, (-1, 2)).to(cache.dtype)
            values[page, :, :, at // 2, :, at % 2] = value.unflatten(1, (-1, 2)).to(cache.dtype)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tile", [2, 4])
def test_slots_in_tiles_and_elements_in_groups(dtype: torch.dtype, tile: int) -> None:
    cache = torch.zeros(PAGES, HEADS, 2 * SIZE * DIM, dtype=dtype)
    width = cache.element_size()
    keys, values = find_placements(layer(cache, tiled(cache, tile)))
    places = torch.arange(cache.numel()).view(cache.shape) * width
    key_places, value_places = in_tiles(places, tile)
    for slot in range(PAGES * SIZE):
        page, at = divmod(slot, SIZE)
        of_key = key_places[page, :, at // tile, :, at % tile].flatten(1)
        of_value = value_places[page, :, :, at // 2, :, at % 2].flatten(1)
        for place, expected in ((keys, of_key), (values, of_value)):
            assert torch.equal(place.offset(slot), (expected[..., None] + torch.arange(width)).flatten(1))
    assert (keys.tile_size, values.tile_size, values.band_bytes) == (tile, 2, 2 * width)


def test_tiles_that_do_not_divide_the_page_are_refused() -> None:
    cache = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM)
    plain = together(cache)

    def uneven(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        at = slots % SIZE
        plain(parts, slots - at + torch.where(at < 3, at, SIZE + 2 - at))

    with pytest.raises(UnsupportedEngine, match="no affine map"):
        find_placements(layer(cache, uneven))


def test_a_layout_without_an_affine_map_is_refused() -> None:
    cache = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM)
    plain = together(cache)

    def shuffled(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        plain(parts, slots // SIZE * SIZE + (slots % SIZE) ** 3 % SIZE)

    with pytest.raises(UnsupportedEngine, match="is not supported"):
        find_placements(layer(cache, shuffled))


def test_scales_that_depend_on_the_content_are_refused() -> None:
    cache = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM)
    plain = together(cache)

    def scaled(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        plain({part: content / content.abs().amax() for part, content in parts.items()}, slots)

    with pytest.raises(UnsupportedEngine, match="is not supported"):
        find_placements(layer(cache, scaled))


def counted(cache: torch.Tensor, writes: list[int]) -> Any:
    plain = together(cache)

    def write(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        writes.append(slots.numel())
        plain(parts, slots)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_layer_like_the_one_before_takes_a_few_writes(dtype: torch.dtype) -> None:
    first, second = (torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=dtype) for _ in range(2))
    second.view(torch.uint8).fill_(7)
    writes: list[int] = []
    likely = find_placements(layer(first, counted(first, writes)))
    alone = len(writes)
    writes.clear()
    assert find_placements(layer(second, counted(second, writes)), likely) == likely
    assert len(writes) == 4 < alone / 5
    assert second.view(torch.uint8).eq(7).all()


@pytest.mark.parametrize("other", ["axes", "heads", "elements", "pages", "parts", "layout"])
def test_a_layer_unlike_the_one_before_is_found_anew(other: str) -> None:
    before = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM)
    likely = find_placements(layer(before, together(before)))
    if other == "layout":  # the same shape, laid out in another way
        cache = torch.zeros(PAGES, HEADS, 2 * SIZE, DIM)
        shown = layer(cache, transposed(cache))
    else:
        cache = torch.zeros(PAGES, SIZE, HEADS, 2 * DIM).permute(0, 2, 1, 3)
        shown = layer(cache, together(cache))
    if other == "heads":
        likely = tuple(replace(place, num_heads=HEADS - 1) for place in likely)
    if other == "elements":
        likely = tuple(replace(place, head_bytes=place.head_bytes - 1) for place in likely)
    if other == "pages":  # in memory without gaps a page of twice the size would lie just so
        cache = torch.zeros(PAGES, SIZE, HEADS, 2 * DIM).permute(0, 2, 1, 3)
        shown, likely = layer(cache, together(cache)), find_placements(layer(cache, together(cache)))
        likely = tuple(
            replace(p, page_size=2 * SIZE, page_stride=2 * p.page_stride, tile_size=2 * SIZE) for p in likely
        )
    if other == "parts":
        likely = likely[:1]
    alone = find_placements(shown)
    assert find_placements(shown, likely) == alone != likely


@pytest.mark.parametrize("wrong", ["first", "head_stride", "slot_stride", "page_stride", "element_stride"])
def test_each_number_of_a_likely_placement_is_confirmed(wrong: str) -> None:
    cache = torch.zeros(PAGES, HEADS, 2 * SIZE, DIM)
    shown = layer(cache, transposed(cache))
    found = find_placements(shown)
    for index, place in enumerate(found):
        if wrong == "element_stride" and place.element_bytes == place.head_bytes:
            continue  # one element: no stride
        likely = list(found)
        likely[index] = replace(place, **{wrong: getattr(place, wrong) + 4})
        assert find_placements(shown, tuple(likely)) == found
