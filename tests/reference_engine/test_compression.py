"""Compressed layers compute what the plain formulas say, and every entry, index key and state matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from canary_kernels.layout import Plane
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens
from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.cache.entry_rows import EntryRows, IndexRows
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.model.llama import random_weights
from canary_obs.reference_engine.model.shapes import CompressedShape
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import EngineConfig, tiny, with_model
from tests.reference_engine.plain_llama import plain_logits
from tests.reference_engine.test_engine import prompt, recorded
from tests.reference_engine.workloads import drain


def settings_of(**changes: object) -> EngineConfig:
    return with_model(tiny(**changes), "compressed")


def without_windows(config: EngineConfig) -> EngineConfig:
    return replace(config, swa_slots=0, shape=replace(config.shape, windows=()))


@pytest.mark.parametrize("change", [lambda config: config, without_windows])
@pytest.mark.parametrize("token_budget", [13, 64])
def test_outputs_equal_the_plain_formulas(
    change: Callable[[EngineConfig], EngineConfig], token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(change(settings_of(token_budget=token_budget)))
    logits = recorded(engine, monkeypatch)
    for seed, length in enumerate((1, 3, 30, 150)):
        engine.add_request(prompt(seed, length), Sampling(max_tokens=8, stop_at_eos=False))
    finished = drain(engine)
    longest = max(finished, key=lambda request: request.length)
    branch = np.concatenate([longest.tokens[:128], prompt(9, 21)])
    engine.add_request(branch, Sampling(max_tokens=8, stop_at_eos=False))
    finished += drain(engine)
    assert engine.statistics.prefix_hit_tokens == 128
    shape, weights = engine.config.shape, random_weights(engine.config.shape, engine.config.seed)
    uncompressed = replace(shape, compressed=None)
    for request in finished:
        tokens = request.tokens[: request.length].tolist()
        plain, without = plain_logits(shape, weights, tokens), plain_logits(uncompressed, weights, tokens)
        for position in range(request.prompt_length - 1, request.length - 1):
            mine = logits[request.serial, position + 1].double()
            # An element at the border of two fp8 values may round otherwise in float32.
            torch.testing.assert_close(mine, plain[position], atol=1e-2, rtol=1e-2)
            assert position < 3 or (mine - without[position]).norm() > 0.1


@pytest.mark.parametrize(
    ("pool", "kind"),
    [(0, "entries"), (0, "keys"), (0, "scales"), (0, "states"), (1, "entries"), (1, "states")],
)
def test_wrong_bytes_change_outputs(kind: str, pool: int) -> None:
    length = 122 if kind == "states" else 150  # states matter when their run is completed: at 128

    def answer(damaged: bool) -> bytes:
        engine = Engine(settings_of())
        request = engine.add_request(prompt(5, length), Sampling(max_tokens=24, stop_at_eos=False))
        while request.computed < length:
            engine.step()
        mine = engine.runner.pool.compressed[pool]
        if damaged and kind == "states":
            mine.states.rows.fill_(3.0)
        elif damaged and kind == "entries":
            mine.entries.rows.fill_(0x35)
        elif damaged:
            assert mine.index is not None
            held = mine.index.keys if kind == "keys" else mine.index.scales.view(torch.int32)
            noise = torch.randint(0, 100, held.shape, generator=torch.Generator().manual_seed(1))
            held.copy_(noise << (20 if kind == "scales" else 0))
        drain(engine)
        return request.output.tobytes()

    assert answer(damaged=True) != answer(damaged=False)


def test_an_entry_row_by_hand() -> None:
    rows = EntryRows(1, 2, 3, (64, 64), "cpu")
    assert rows.row_bytes == 64 + 128 + 8
    entry = torch.zeros(1, 128)
    entry[0, 0], entry[0, 1], entry[0, 64] = 448.0 * 4, -4.0, 1.5
    rows.write(0, torch.tensor([4]), entry)
    found = rows.rows[0, 1, 1, 0]
    assert found[:2].tolist() == [0x7E, 0xB8]  # 448 and -1 in e4m3, times 4
    assert found[64:66].tolist() == [0xC0, 0x3F]  # 1.5 in bfloat16
    assert found[192:].tolist() == [127 + 2, 0, 0, 0, 0, 0, 0, 0]
    assert rows.rows.count_nonzero() == 5
    assert torch.equal(rows.read(0, torch.tensor([4])), entry)
    assert EntryRows(1, 1, 1, (448, 64), "cpu").row_bytes == 584


def test_an_index_page_by_hand() -> None:
    index = IndexRows(1, 2, 3, 4, "cpu")
    index.write(0, torch.tensor([5]), torch.tensor([[224.0, -448.0, 0.0, 448.0]]))
    memory = torch.empty(0, dtype=torch.uint8).set_(index.keys.untyped_storage())
    page = memory[64:]
    assert page[8:12].tolist() == [0x76, 0xFE, 0, 0x7E]
    assert page[20:24].view(torch.float32).item() == 1.0  # behind all keys of the page
    assert memory.count_nonzero() == 5
    assert index.read(0, torch.tensor([5])).tolist() == [[224.0, -448.0, 0.0, 448.0]]


def test_stand_ins_depend_on_every_token_and_its_place() -> None:
    generator = np.random.default_rng(0)
    run = generator.integers(0, 258, 128).astype(np.int32)
    seen = {int(surrogate_tokens(run, 128)[0])}
    for place in range(128):
        changed = run.copy()
        changed[place] += 1
        seen.add(int(surrogate_tokens(changed, 128)[0]))
    assert len(seen) == 129
    assert min(seen) >= 0
    assert surrogate_tokens(run[:4], 4)[0] != surrogate_tokens(run[3::-1].copy(), 4)[0]
    assert surrogate_tokens(run, 4).tolist() == [
        int(surrogate_tokens(run[i : i + 4], 4)[0]) for i in range(0, 128, 4)
    ]
    assert surrogate_tokens(run[:0], 4).size == 0


def test_groups_and_their_sizes() -> None:
    engine = Engine(settings_of())
    groups = {group.name: group for group in ReferenceAdapter(engine).groups}
    assert list(groups) == ["full", "swa", "c4", "c4_indexer", "c4_state", "c128", "c128_state"]
    pages = engine.config.num_slots // 128
    sizes = {
        name: (group.num_slots, group.page_size, sum(source.slot_bytes for source in group.sources))
        for name, group in groups.items()
    }
    assert sizes["c4"] == (32 * pages, 32, 584)
    assert sizes["c128"] == (pages, 1, 584)
    assert sizes["c4_indexer"] == (32 * pages, 32, 64 + 4)
    assert sizes["c4_state"] == (2 * 8 * 4, 1, 4 * (512 + 64 + 1))
    assert sizes["c128_state"] == (2 * 8 * 128, 1, 4 * (512 + 1))
    assert {source.plane for source in groups["c4_indexer"].sources} == set(Plane)
    (source,) = groups["c4"].sources
    assert source.page_stride % source.slot_bytes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"page_size": 64}, "one ratio per layer that divides page_size=64"),
        ({"host_pages": 4, "swa_slots": 0, "windows": ()}, "the host tier"),
        ({"ratios": (4,)}, "one ratio per layer"),
        ({"rank": 100}, "in steps of 64"),
    ],
)
def test_sizes_that_cannot_serve_are_refused(change: dict[str, object], told: str) -> None:
    config = settings_of()
    sizes, shape, rest = config.shape.compressed, config.shape, dict(change)
    assert isinstance(sizes, CompressedShape)
    sizes = replace(sizes, **{name: rest.pop(name) for name in ("ratios", "rank") if name in rest})
    shape = replace(shape, compressed=sizes, windows=rest.pop("windows", shape.windows))
    with pytest.raises(ConfigurationError, match=told):
        Engine(replace(config, shape=shape, **rest))
