"""The CPU backend's own KV writes in every layout this machine has: the map found reads them back."""

from __future__ import annotations

import pytest
import torch

from canary_kernels.layout import Part
from canary_obs.kv_locations.placement import LayerWrite, find_placements

PAGES, HEADS = 3, 2
KEPT = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def layouts() -> list[tuple[str, torch.dtype, int, int, str]]:
    """Each instruction set's name in vLLM, dtype, page and head size, and KV dtype."""
    found = [("vec", dtype, 32, 64) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    found.append(("vec", torch.float16, 128, 256))
    if torch.cpu._is_amx_tile_supported():
        found += [("amx", torch.bfloat16, page, size) for page, size in ((32, 32), (64, 96), (128, 128))]
    kept = KEPT if torch.cpu._is_avx512_supported() else ["auto"]
    return [("vec16", torch.float32, 16, 80, "auto"), *((*one, kv) for one in found for kv in kept)]


@pytest.mark.parametrize(("isa", "dtype", "page", "size", "kept"), layouts())
def test_what_the_backend_wrote_is_read_back(
    isa: str, dtype: torch.dtype, page: int, size: int, kept: str
) -> None:
    from vllm import _custom_ops as ops

    torch.manual_seed(1)
    cache = torch.zeros(PAGES, HEADS, page, 2 * size, dtype=torch.uint8 if KEPT[kept] else dtype)
    halves = cache.view(PAGES, HEADS, page * 2, size).chunk(2, dim=2)

    def write(parts: dict[Part, torch.Tensor], slots: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(
            parts[Part.K], parts[Part.V], *halves, slots, isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype=kept,
        )  # fmt: skip

    shapes = {Part.K: (HEADS, size), Part.V: (HEADS, size)}
    found = find_placements(
        LayerWrite(name=isa, cache=cache, page_size=page, shapes=shapes, dtype=dtype, write=write)
    )
    slots = torch.randperm(PAGES * page)
    made = {part: values((len(slots), *shape), KEPT[kept]).to(dtype) for part, shape in shapes.items()}
    write(made, slots)
    written = cache.view(torch.uint8).view(-1)
    for place in found:
        expected = made[place.part].to(KEPT[kept] or dtype).view(torch.uint8)
        for row, slot in enumerate(slots[:64].tolist()):
            assert torch.equal(written[place.offset(slot)], expected[row])


def values(shape: tuple[int, ...], kept: torch.dtype | None) -> torch.Tensor:
    """Random numbers; for fp8, where backends round in their own way, such that both formats hold exactly."""
    if kept is None:
        return torch.randn(shape)
    fraction, exponent = torch.randint(4, 8, shape), torch.randint(-5, 4, shape)
    return torch.where(torch.rand(shape) < 0.5, -1, 1) * fraction * 2.0**exponent
