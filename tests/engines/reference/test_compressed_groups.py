"""What the canary is shown of compressed pools, against a naive account of every slot."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from canary_kernels.fingerprint import plan_fingerprint
from canary_kernels.layout import RealData, unsigned
from canary_obs.engine_api.views import GroupStep, GroupTokens, StepView
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny, with_model
from tests.engines.reference.test_adapter import Recorder, naive_digest
from tests.reference_engine.test_engine import prompt
from tests.reference_engine.workloads import drain, drive

RATIOS = {"c4": 4, "c4_indexer": 4, "c128": 128}
STATES = {"c4_state": 4, "c128_state": 128}


class Account:
    """Which tokens each slot of each group must stand for."""

    def __init__(self, engine: Engine, adapter: ReferenceAdapter) -> None:
        self._engine = engine
        self._pages = {group.name: group.page_size for group in adapter.groups}
        self.owner: dict[tuple[str, int], tuple[int, ...]] = {}
        self.seen: Counter[str] = Counter()

    def check(self, step: StepView) -> None:
        requests = {request.id: request for request in self._engine.unfinished}
        for index, name in enumerate(step.request_ids):
            prefix, extend = int(step.prefix_lens[index]), int(step.extend_lens[index])
            tokens = requests[name].tokens[: prefix + extend].tolist()
            for group, ratio in RATIOS.items():
                self._entries(step, group, index, ratio, tokens)
            for group, ratio in STATES.items():
                self._states(step, group, index, ratio, tokens)

    def _entries(self, step: StepView, group: str, index: int, ratio: int, tokens: list[int]) -> None:
        own = step.groups[group]
        prefix = int(step.prefix_lens[index]) // ratio
        ids = surrogate_tokens(np.array(tokens[: len(tokens) // ratio * ratio], np.int32), ratio).tolist()
        self._sequence(step, own, group, (index, prefix, ids), int(step.rows[index]))

    def _states(self, step: StepView, group: str, index: int, ratio: int, tokens: list[int]) -> None:
        own, count = step.groups[group], len(step.request_ids)
        assert own.tokens is not None
        assert own.tokens.rows is not None
        first = int(step.prefix_lens[index])
        run = tokens[first - first % ratio :]
        if len(run) < ratio:
            self._sequence(step, own, group, (index, first % ratio, run), int(own.tokens.rows[index]))
            assert int(own.tokens.rows[index + count]) == -1
            return
        old, new = run[: first % ratio], run[len(run) - len(tokens) % ratio :]
        rows = own.tokens.rows[index], own.tokens.rows[index + count]
        assert {int(row) // 2 for row in rows} == {int(step.rows[index])}
        assert rows[0] != rows[1]
        self._sequence(step, own, group, (index, len(old), old), int(rows[0]))
        self._sequence(step, own, group, (index + count, 0, new), int(rows[1]))
        self.seen[f"{group} moved"] += bool(old and new)

    def _sequence(
        self, step: StepView, own: GroupStep, group: str, what: tuple[int, int, list[int]], row: int
    ) -> None:
        """A request's whole sequence in a group: `ids`, of which `prefix` were there before."""
        index, prefix, ids = what
        given = own.tokens
        assert isinstance(given, GroupTokens)
        assert given.digests is not None
        start, stop = int(given.token_starts[index]), int(given.token_starts[index + 1])
        assert (int(given.prefix_lens[index]), int(given.extend_lens[index])) == (prefix, len(ids) - prefix)
        assert stop - start == len(ids) - prefix
        assert given.input_ids[start:stop].tolist() == ids[prefix:]
        assert given.positions[start:stop].tolist() == list(range(prefix, len(ids)))
        if prefix:
            assert unsigned(int(given.digests[index])) == naive_digest(ids[:prefix])
        page = self._pages[group]
        slots = [int(own.slot_table[row, n // page]) * page + n % page for n in range(len(ids))]
        assert len(set(slots)) == len(slots)
        assert own.out_slots[start:stop].tolist() == slots[prefix:]
        for place in range(prefix):
            assert self.owner[group, slots[place]] == tuple(ids[: place + 1])
        for place in range(prefix, len(ids)):
            self.owner[group, slots[place]] = tuple(ids[: place + 1])
        self.seen[group] += len(ids) - prefix


def test_views_against_a_naive_account() -> None:
    engine = Engine(with_model(tiny(), "compressed"))
    adapter = ReferenceAdapter(engine)
    account = Account(engine, adapter)
    recorder = Recorder(account.check)
    adapter.attach(recorder)
    drive(engine, 120, seed=1)
    assert recorder.faults == []
    assert engine.statistics.prefix_hit_tokens > 0
    assert min(account.seen.values()) > 5
    assert set(account.seen) == {*RATIOS, *STATES, "c4_state moved", "c128_state moved"}


@pytest.mark.parametrize(("group", "ratio"), RATIOS.items())
def test_the_prefix_cache_by_entries(group: str, ratio: int) -> None:
    engine = Engine(with_model(tiny(), "compressed"))
    adapter = ReferenceAdapter(engine)
    view = adapter.prefix_cache
    engine.add_request(prompt(1, 260), Sampling(max_tokens=4, stop_at_eos=False))
    drain(engine)
    full = view.cached("full", unlocked_only=False)
    held = view.cached(group, unlocked_only=True)
    order = held.positions.argsort()
    assert held.positions[order].tolist() == list(range(256 // ratio))
    assert held.previous[order].tolist() == [-1, *held.slots[order][:-1].tolist()]
    assert set(held.slots.tolist()) == {slot // ratio for slot in full.slots.tolist()}
    assert sorted(adapter.slots_in_use(group).tolist()) == sorted(held.slots.tolist())
    assert view.still_cached(group, held.slots).all()
    for dropped in engine.scheduler.cache.evict(1):
        engine.scheduler.allocator.free(dropped)
    assert not view.still_cached(group, held.slots).any()


def test_live_states_and_holders() -> None:
    engine = Engine(with_model(tiny(token_budget=64), "compressed"))
    adapter = ReferenceAdapter(engine)
    request = engine.add_request(prompt(1, 138), Sampling(max_tokens=8, stop_at_eos=False))
    while request.computed < 138:
        engine.step()
    for group, ratio in STATES.items():
        live = adapter.slots_in_use(group)
        assert live.numel() == request.computed % ratio > 0
        assert adapter.holders(group, int(live[-1])) == (request.id,)
        assert adapter.holders(group, int(live[-1]) + 1) == ()
        assert adapter.prefix_cache.cached(group, unlocked_only=False).slots.numel() == 0
        assert not adapter.prefix_cache.still_cached(group, live).any()
    for group, ratio in RATIOS.items():
        live = adapter.slots_in_use(group)
        assert live.numel() == request.computed // ratio
        assert adapter.holders(group, int(live[0])) == (request.id,)
    drain(engine)
    assert all(adapter.slots_in_use(group).numel() == 0 for group in STATES)


def test_sources_are_every_byte_that_a_pool_holds() -> None:
    engine = Engine(with_model(tiny(), "compressed"))
    groups = {group.name: group for group in ReferenceAdapter(engine).groups}
    for pool in engine.runner.pool.compressed:
        for name, tensors in (
            (f"c{pool.ratio}", [pool.entries.rows]),
            (f"c{pool.ratio}_state", [pool.states.rows]),
            (f"c{pool.ratio}_indexer", [pool.index.keys, pool.index.scales] if pool.index else []),
        ):
            held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if held:
                group = groups[name]
                plan = plan_fingerprint(group.sources, RealData.ALL, torch.device("cpu"))
                assert plan.bytes_per_slot * group.num_slots == held
