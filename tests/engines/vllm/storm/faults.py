"""Damage that a leg must report: in an idle block, and in the block table of a running request."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.engines.vllm.real.rig import Rig

_PROMPT, _POSITION = 100, 64  # the position's block is complete after the prompt, and within every window
_STEPS = 6  # until both requests are being decoded


def zero_block(rig: Rig) -> None:
    """Zeroes a block that the prefix cache holds; without a prefix cache one of a running request."""
    if idle := rig.idle_blocks():
        rig.layer_cache(0, 0)[idle[0]].zero_()
        return
    _start_two(rig)
    column = _POSITION // rig.adapter.vllm_groups[0].view.page_size
    rig.layer_cache(0, 0)[rig.blocks_of("fault-a")[column]].zero_()
    rig.finish()


def exchange_table_entries(rig: Rig) -> None:
    """For one step two requests have one block of each other's in the worker's table."""
    _start_two(rig)
    table, rows = rig.block_table()
    first, second = (row for name, row in rows.items() if name.startswith("fault-"))
    column = _POSITION // rig.adapter.vllm_groups[0].view.page_size
    kept = int(table[first, column]), int(table[second, column])
    table[first, column], table[second, column] = kept[::-1]
    rig.step()
    table[first, column], table[second, column] = kept
    rig.finish()


def _start_two(rig: Rig) -> None:
    draw = random.Random(99)
    prompts = {name: [draw.randrange(4, 1024) for _ in range(_PROMPT)] for name in ("fault-a", "fault-b")}
    rig.start(prompts, 30)
    rig.step(_STEPS)


FAULTS: dict[str, tuple[Callable[[Rig], None], frozenset[str]]] = {
    "zeroed": (zero_block, frozenset({"kv_data"})),
    "table": (exchange_table_entries, frozenset({"token", "chain", "position"})),
}
