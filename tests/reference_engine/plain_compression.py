"""Independent compressed attention: whole sequence, no cache, float64, one run and token after another."""

from __future__ import annotations

import torch
from torch import Tensor

from canary_obs.reference_engine.model.shapes import CompressedShape

_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
_FP8 = _FP8[_FP8.isfinite()]


def compressed_part(sizes: CompressedShape, layer: int, weights: dict[str, Tensor], normed: Tensor) -> Tensor:
    """float64 [tokens, hidden] that a layer adds; weights float64 by name, normed [tokens, hidden]."""
    prefix, ratio = f"model.layers.{layer}.compressor.", sizes.ratios[layer]
    mine = {name.removeprefix(prefix)[:-7]: w for name, w in weights.items() if name.startswith(prefix)}
    indexed, states = ratio == sizes.indexed, normed @ mine["state_proj"].T
    entries, keys = [], []
    for start in range(0, len(normed) - ratio + 1, ratio):
        run = states[start : start + ratio]
        gates = (run[:, -1] + mine["place_bias"][:, 0]).softmax(0)
        row = gates @ run[:, :-1]
        rope = turned(row[sizes.rank : sizes.entry], start).bfloat16().double()
        entries.append(torch.cat([_rounded_blocks(row[: sizes.rank]), rope]))
        if indexed:
            keys.append(rounded(turned(row[sizes.entry :], start)))
    mixed = []
    for position, vector in enumerate(normed):
        visible = list(range((position + 1) // ratio))
        if indexed and len(visible) > sizes.top_k:
            asked = (mine["index_q_proj"] @ vector).view(sizes.index_heads, -1)
            asked = torch.stack([turned(one, position) for one in asked])
            scores = asked @ torch.stack(keys)[visible].T
            scores = (scores * scores.sigmoid()).T @ (mine["index_w_proj"] @ vector)
            visible = scores.topk(sizes.top_k).indices.tolist()
        mixed.append(_attended(sizes, mine["q_proj"] @ vector, position, [entries[i] for i in visible]))
    return torch.stack(mixed) @ mine["o_proj"].T


def turned(vector: Tensor, position: int) -> Tensor:
    """vector [dim] at a position."""
    half = vector.shape[0] // 2
    angles = position * 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    )


def _attended(sizes: CompressedShape, query: Tensor, position: int, entries: list[Tensor]) -> Tensor:
    heads = []
    for asked in query.view(sizes.heads, sizes.entry):
        asked = torch.cat([asked[: sizes.rank], turned(asked[sizes.rank :], position)])
        weights = [torch.exp(asked @ entry / sizes.entry**0.5) for entry in entries]
        total = sum(weights, torch.ones((), dtype=torch.float64))  # the sink has score 0
        parts = [weight / total * entry[: sizes.rank] for weight, entry in zip(weights, entries, strict=True)]
        heads.append(sum(parts, torch.zeros(sizes.rank, dtype=torch.float64)))
    return torch.cat(heads)


def _nearest(values: Tensor) -> Tensor:
    return _FP8[(values[:, None] - _FP8).abs().argmin(1)]


def rounded(vector: Tensor) -> Tensor:
    """vector [dim] as fp8 with one scale."""
    scale = vector.abs().max() / 448
    return _nearest(vector / scale) * scale


def _rounded_blocks(vector: Tensor) -> Tensor:
    blocks = []
    for block in vector.view(-1, 64):
        scale = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448))
        blocks.append(_nearest(block / scale) * scale)
    return torch.cat(blocks)
