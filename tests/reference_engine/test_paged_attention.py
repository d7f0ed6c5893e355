"""Decode attention over the pool equals plain softmax attention, with and without a window."""

from __future__ import annotations

import pytest
import torch

from canary_obs.reference_engine.model.paged_attention import PagedAttention

HEADS, KV_HEADS, DIM, SLOTS = 2, 1, 8, 120
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("window", [0, 16])
def test_equals_plain_attention(window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    kv = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=generator).to(DEVICE)
    lengths, rows = [1, 17, 70, 3], [3, 0, 4, -1]
    table = torch.full((6, 80), SLOTS - 1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(SLOTS - 1, generator=generator)
    kv[:, SLOTS - 1] = float("nan")
    wanted, used = [], 0
    query = torch.randn(len(rows), HEADS, DIM, generator=generator).to(DEVICE)
    for index, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        if row < 0:
            continue
        # What the window has left is gone: its entries lead to NaN.
        first = max(0, length - window) if window else 0
        slots = order[used : used + length - first].to(DEVICE)
        used += length - first
        table[row, first:length] = slots.int()
        keys, values = (part[slots].repeat_interleave(HEADS // KV_HEADS, dim=1) for part in kv)
        scores = torch.einsum("hd,nhd->hn", query[index], keys) / DIM**0.5
        wanted.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values).reshape(-1))
    attention = PagedAttention(len(rows), HEADS, KV_HEADS, DIM, DEVICE)
    found = attention.attend(
        kv, query, table, torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE) - 1, window
    )
    torch.testing.assert_close(found[:-1], torch.stack(wanted), atol=1e-5, rtol=1e-5)
    assert not found[-1].any(), "padding answers 0, not what its memory held before"
