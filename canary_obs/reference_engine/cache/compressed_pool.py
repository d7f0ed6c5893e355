"""Memory of compressed layers, by ratio: entries in the pages of their tokens, states in rows of requests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from canary_obs.reference_engine.cache.entry_rows import EntryRows, IndexRows, StateRows
from canary_obs.reference_engine.model.shapes import CompressedShape
from canary_obs.reference_engine.settings import EngineConfig


class CompressedPool:
    """Everything that layers of one ratio hold.

    The entry of a run lies in slot `last token's slot // ratio`: a page of tokens is a page of entries.
    The states of a request's incomplete run lie in one of its two buffers of `ratio` slots; the next
    incomplete run takes the other buffer, so that a forward can read one while it fills the other.
    """

    def __init__(self, sizes: CompressedShape, ratio: int, config: EngineConfig) -> None:
        self.ratio, self.sizes = ratio, sizes
        self.layers = tuple(layer for layer, own in enumerate(sizes.ratios) if own == ratio)
        self.held_as = {layer: index for index, layer in enumerate(self.layers)}
        self.page_size = config.page_size
        self.per_page = config.page_size // ratio
        pages, device, count = config.num_slots // config.page_size, config.device, len(self.layers)
        self.num_entries = pages * self.per_page
        self.entries = EntryRows(count, pages, self.per_page, (sizes.rank, sizes.rope), device)
        self.index: IndexRows | None = None
        if ratio == sizes.indexed:
            self.index = IndexRows(count, pages, self.per_page, sizes.rope, device)
        self.page_table = torch.zeros(
            (config.max_running, -(-config.max_context // config.page_size)), dtype=torch.int32, device=device
        )  # row x page of tokens -> page number
        buffers = 2 * config.max_running
        self.num_states = buffers * ratio
        self.states = StateRows(count, self.num_states, sizes.state(ratio), device)
        slots = torch.arange(self.num_states, dtype=torch.int32, device=device)
        self.state_table = slots.view(buffers, ratio)  # 2 * row + buffer x place in the run -> slot
        self.buffer = np.zeros(config.max_running, dtype=np.int64)  # by row; where the incomplete run lies
        self._order = torch.arange(self.page_size, device=device)

    def follow(self, req_to_token: Tensor) -> None:
        """Bring the page table up to date with the tokens' slots."""
        firsts = req_to_token[:, :: self.page_size]
        torch.div(firsts, self.page_size, rounding_mode="floor", out=self.page_table)

    def slots_of(self, row: int, entries: int) -> Tensor:
        """int64 [entries]: slots of a row's first entries, through the page table."""
        pages = self.page_table[row, : -(-entries // self.per_page)].long()
        return (pages[:, None] * self.per_page + self._order[: self.per_page]).view(-1)[:entries]

    def state_slots(self, buffers: Tensor, places: Tensor) -> Tensor:
        """int64 [n]: slots of states, through the state table."""
        return self.state_table[buffers, places].long()
