"""Faults injected into vLLM's own tensors and tables, not through the canary's code."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Part, Phase, Reason
from tests.engines.vllm.real.rig import Rig, prompts

pytestmark = pytest.mark.usefixtures("clean")
LINKS = {Reason.CHAIN, Reason.POSITION, Reason.TOKEN}


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_CANARY_LANE_ROWS", "1024")  # every violation row is inspected here
        made = Rig(models("llama"))
    yield made
    made.close()


@pytest.fixture
def clean(rig: Rig) -> Iterator[None]:
    rig.fresh()
    yield
    rig.fresh()


def own(count: int, seed: int, length: int = 100) -> dict[str, list[int]]:
    """Requests without shared prefixes."""
    draw = random.Random(seed)
    return {f"r{i}-{seed}": [draw.randrange(4, 1024) for _ in range(length)] for i in range(count)}


def words(cache: torch.Tensor, block: int, head: int) -> tuple[torch.Tensor, ...]:
    """A head's K and V in a block, in words of 32 bits: [rows, words of a row]."""
    page = cache.view(torch.int32)[block, head]
    if page.is_cuda:
        return page.chunk(2, dim=-1)  # side by side in each token
    return tuple(page.view(2, len(page), -1))  # one after the other


def slots_of(block: int) -> range:
    return range(block * 32, block * 32 + 32)


def test_one_bit_in_every_layer_and_part_of_an_idle_block(rig: Rig) -> None:
    rig.generate(prompts(4))
    draw = random.Random(1)
    for layer in range(3):
        for part in (0, 1):
            rig.found.clear()
            block, bit = draw.choice(rig.idle_blocks()), 1 << draw.randrange(31)
            page = words(rig.layer_cache(0, layer), block, draw.randrange(2))[part]
            place = draw.randrange(page.shape[0]), draw.randrange(page.shape[1])
            with rig.at_rest():
                page[place] ^= bit
                found = rig.settle()
                page[place] ^= bit
            assert {violation.phase for violation in found} == {Phase.PATROL, Phase.SWEEP}, (layer, part)
            assert {violation.reason for violation in found} == {Reason.KV_DATA}
            assert {violation.part for violation in found} == {(Part.K, Part.V)[part]}
            assert {violation.slot for violation in found} <= set(slots_of(block))


def test_one_bit_in_every_layer_and_part_of_a_block_in_use(rig: Rig) -> None:
    rig.start(own(2, seed=2))
    rig.step(4)
    block = rig.blocks_of("r0-2")[1]
    for layer in range(3):
        for page in words(rig.layer_cache(0, layer), block, 1):
            rig.found.clear()
            with rig.at_rest():
                page[0, 7] ^= 1 << 9
                rig.settle()
                page[0, 7] ^= 1 << 9
            assert {violation.reason for violation in rig.found} == {Reason.KV_DATA}
            assert {violation.slot // 32 for violation in rig.found} == {block}


def test_two_blocks_swapped(rig: Rig) -> None:
    rig.generate(prompts(4))
    first, second = rig.idle_blocks()[:2]
    for layer in range(3):
        cache = rig.layer_cache(0, layer)
        cache[[first, second]] = cache[[second, first]]
    found = rig.settle()
    assert {violation.reason for violation in found} == {Reason.KV_DATA}
    assert {violation.slot // 32 for violation in found} == {first, second}


def test_page_zeroed(rig: Rig) -> None:
    rig.generate(prompts(4))
    block = rig.idle_blocks()[3]
    rig.layer_cache(0, 2)[block].zero_()
    found = rig.settle()
    assert {violation.reason for violation in found} == {Reason.KV_DATA}
    assert {violation.slot // 32 for violation in found} == {block}


def test_table_entry_of_another_request(rig: Rig) -> None:
    rig.start(own(2, seed=3))
    rig.step(4)
    table, _ = rig.block_table()
    first, second = rig.row_of("r0-3"), rig.row_of("r1-3")
    right, table[first, 1] = int(table[first, 1]), int(table[second, 1])
    rig.step(2)
    table[first, 1] = right
    found = rig.settle()
    assert {violation.reason for violation in found} <= LINKS
    assert {violation.phase for violation in found} == {Phase.HEAD, Phase.TAIL}
    assert all(violation.request and violation.request.startswith("r0-3") for violation in found)


def test_rows_exchanged(rig: Rig) -> None:
    rig.start(own(2, seed=4))
    rig.step(4)
    table, rows = rig.block_table()
    pair = list(rows.values())
    table[pair] = table[pair[::-1]]
    rig.step()
    table[pair] = table[pair[::-1]]
    rig.settle()
    assert (Phase.HEAD, Reason.TOKEN) in rig.reasons()
    named = {violation.request[:4] for violation in rig.found if violation.request}
    assert named == {"r0-4", "r1-4"}


def test_freed_block_handed_to_a_second_request(rig: Rig) -> None:
    rig.start(own(1, seed=5))
    rig.step(4)
    pool = rig.core.scheduler.kv_cache_manager.block_pool
    stolen = pool.blocks[rig.blocks_of("r0-5")[0]]
    pool._maybe_evict_cached_block(stolen)
    pool.free_blocks([stolen])
    rig.start(own(1, seed=6))
    rig.step(2)
    assert stolen.block_id in rig.blocks_of("r0-6")
    stolen.ref_cnt += 1  # the first owner will free it too
    rig.settle()
    named = {(violation.request or "")[:4] for violation in rig.found if violation.reason in LINKS}
    assert named == {"r0-5"}


def off_by_one(rig: Rig) -> tuple[Any, str]:
    """Let the runner compute each slot mapping one slot off; where, and under which name."""
    if hasattr(rig.runner, "req_states"):
        tables, name = rig.runner.block_tables, "compute_slot_mappings"
        mapping = tables.slot_mappings
    else:
        tables, name = rig.runner.input_batch.block_table[0], "compute_slot_mapping"
        mapping = tables.slot_mapping.gpu
    compute = getattr(tables, name)

    def shifted(*given: Any, **named: Any) -> Any:
        result = compute(*given, **named)
        mapping.add_(1)
        return result

    setattr(tables, name, shifted)
    return tables, name


def test_slot_mapping_off_by_one(rig: Rig) -> None:
    tables, name = off_by_one(rig)
    try:
        rig.start(own(1, seed=7))
        rig.step(3)
    finally:
        delattr(tables, name)
    rig.settle()
    reasons = {violation.reason for violation in rig.found}
    assert Reason.POSITION in reasons
    assert Reason.UNWRITTEN in reasons


def test_copy_that_skips_the_last_layer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
    copying = sys.modules[runners[hasattr(rig.runner, "req_states")]]

    def skipping(caches: Any, num_blocks: int, copies: Any) -> None:
        for cache in list(caches)[:-1]:
            for source, destination in copies:
                cache[destination] = cache[source]

    monkeypatch.setattr(copying, "copy_kv_cache_blocks_inplace", skipping)
    rig.generate(prompts(4))
    source, destination = rig.idle_blocks()[0], 499
    schedule = rig.core.scheduler.schedule

    def with_copy(*given: Any) -> Any:
        output = schedule(*given)
        output.kv_cache_block_copies = [(source, destination)]
        rig.core.scheduler.schedule = schedule
        return output

    rig.core.scheduler.schedule = with_copy
    rig.generate(list(own(1, seed=8).values()))
    found = rig.settle()
    assert {violation.reason for violation in found} == {Reason.KV_DATA}
    assert {violation.slot // 32 for violation in found} == {destination}
