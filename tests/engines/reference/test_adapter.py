"""The adapter shows what is true, takes itself out exactly, and keeps its own faults from the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from canary_kernels.hashing import mix64_int
from canary_kernels.layout import CHAIN_ANCHOR, Part, unsigned
from canary_obs.engine_api.views import StepView
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.registry import adapter_for
from canary_obs.errors import UnsupportedEngine
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny
from tests.reference_engine.workloads import drain, drive


class Recorder:
    """An Observer that records its calls; `before` is called with each view."""

    def __init__(self, before: Callable[[StepView], None] | None = None) -> None:
        self.calls: list[str] = []
        self.overhead = {"adapter": 0.0}
        self.faults: list[tuple[str, Exception]] = []
        self.before = before
        self.more = False

    compares_hits = True

    def hit(self, group: str, slots: Tensor) -> None:
        del group, slots

    def requests_changed(self, changes: object) -> None:
        del changes

    def before_forward(self, step: StepView) -> None:
        self.calls.append("before")
        if self.before is not None:
            self.before(step)

    def after_forward(self, step: StepView) -> None:
        self.calls.append("after")

    def forward_failed(self, step: StepView) -> None:
        self.calls.append("failed")

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append((part, error))

    def after_step(self) -> None:
        self.calls.append("step")

    def idle(self) -> bool:
        self.calls.append("idle")
        return self.more

    def copied(self, group: str, source: Tensor, destination: Tensor) -> None:
        raise AssertionError("the reference engine copies no slots")

    def received(
        self, group: str, slots: Tensor, records: Tensor | None = None, peer: str = "", request: str = ""
    ) -> None:
        raise AssertionError("the reference engine receives no slots")

    def record_format(self, group: str) -> int | None:
        return None

    def records_of(self, group: str, slots: Tensor, shares: Sequence[range] = ()) -> Tensor | None:
        raise AssertionError("the reference engine sends no slots")

    def invalidated(self, group: str, slots: Tensor) -> None:
        raise AssertionError("the reference engine invalidates no slots")


def naive_digest(tokens: list[int]) -> int:
    return unsigned(CHAIN_ANCHOR + sum(mix64_int(token, position) for position, token in enumerate(tokens)))


@pytest.mark.parametrize("page_size", [1, 16])
def test_views_against_a_naive_account(page_size: int) -> None:
    engine = Engine(tiny(page_size=page_size))
    adapter = ReferenceAdapter(engine)
    owner: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to and including its own
    seen = {"requests": 0, "prefill": 0, "hits": 0}

    def check(step: StepView) -> None:
        requests = {request.id: request for request in engine.unfinished}
        table = step.groups["full"].slot_table
        assert table is engine.runner.pool.req_to_token
        for index, name in enumerate(step.request_ids):
            request = requests[name]
            prefix, extend = int(step.prefix_lens[index]), int(step.extend_lens[index])
            start, stop = int(step.token_starts[index]), int(step.token_starts[index + 1])
            tokens = request.tokens[: prefix + extend].tolist()
            assert stop - start == extend > 0
            assert step.input_ids[start:stop].tolist() == tokens[prefix:]
            assert step.expected_ids is not None
            assert step.expected_ids[start:stop].tolist() == tokens[prefix:]
            assert step.positions[start:stop].tolist() == list(range(prefix, prefix + extend))
            slots = table[int(step.rows[index]), : prefix + extend].tolist()
            assert len(set(slots)) == len(slots)
            assert step.groups["full"].out_slots[start:stop].tolist() == slots[prefix:]
            for position in range(prefix):
                assert owner[slots[position]] == tuple(tokens[: position + 1])
            for position in range(prefix, prefix + extend):
                owner[slots[position]] = tuple(tokens[: position + 1])
            assert step.digests is not None
            assert unsigned(int(step.digests[index])) == naive_digest(tokens[:prefix])
            seen["requests"] += 1
            seen["prefill"] += extend > 1
            seen["hits"] += request.shared > 0

    adapter.attach(Recorder(check))
    drive(engine, 150, seed=1)
    assert min(seen.values()) > 20
    assert engine.statistics.preemptions > 0 or page_size > 1
    assert sorted(adapter.slots_in_use("full").tolist()) == sorted(
        {
            slot
            for request in engine.scheduler.running
            for slot in request.slots[request.shared : request.computed].tolist()
        }
        | set(engine.scheduler.cache.held().tolist())
    )


def test_digests_survive_row_changes_and_restarts() -> None:
    engine = Engine(tiny())
    digests = PrefixDigests(engine.config.max_running)
    generator = np.random.default_rng(0)
    requests = [
        engine.add_request(generator.integers(0, 256, 60).astype(np.int32), Sampling()) for _ in range(4)
    ]
    for _ in range(200):
        batch = generator.permutation(4)[: generator.integers(1, 5)]
        rows = generator.permutation(engine.config.max_running)[: len(batch)]
        for index, row in zip(batch, rows, strict=True):
            request = requests[index]
            request.row = int(row) if generator.random() < 0.3 or request.row < 0 else request.row
            request.computed = int(generator.integers(0, 61))
        chosen = [requests[index] for index in batch]
        chosen = list({request.row: request for request in chosen}.values())
        for request, digest in zip(chosen, digests.advance(chosen).tolist(), strict=True):
            assert unsigned(digest) == naive_digest(request.tokens[: request.computed].tolist())


def test_sources_lead_to_the_bytes() -> None:
    engine = Engine(tiny(page_size=16))
    group = ReferenceAdapter(engine).groups[0]
    kv = engine.runner.pool.kv
    kv.copy_(torch.randn(kv.shape))
    assert (group.name, group.num_slots, group.page_size) == ("full", 256, 1)
    assert {(source.layer, source.part) for source in group.sources} == {
        (layer, part) for layer in range(2) for part in (Part.K, Part.V)
    }
    flat = kv.reshape(-1).view(torch.uint8)
    for source in group.sources:
        base = source.tensor.data_ptr() - kv.data_ptr()
        for slot in (0, 17, 255):
            for head in range(source.num_heads):
                start = base + slot * source.page_stride + head * source.head_stride
                expected = kv[source.layer, source.part - Part.K, slot, head].view(torch.uint8)
                assert torch.equal(flat[start : start + source.head_bytes], expected)


def test_detach_restores_exactly() -> None:
    engine = Engine(tiny())
    objects = (engine, engine.runner, engine.scheduler, engine.runner.pool)
    before = [dict(vars(item)) for item in objects]
    adapter = ReferenceAdapter(engine)
    for _ in range(2):
        recorder = Recorder()
        adapter.attach(recorder)
        adapter.attach(recorder)
        engine.idle()
        engine.step()
        assert recorder.calls == ["idle", "step"]
        adapter.detach()
        adapter.detach()
        for item, attributes in zip(objects, before, strict=True):
            assert list(vars(item)) == list(attributes)
            assert all(vars(item)[name] is value for name, value in attributes.items())
    engine.idle()
    assert recorder.calls == ["idle", "step"]


def test_outputs_are_the_same_with_and_without() -> None:
    def run(observed: bool) -> list[tuple[str, list[int]]]:
        engine = Engine(tiny())
        if observed:
            ReferenceAdapter(engine).attach(Recorder())
        return [(request.id, request.output.tolist()) for request in drive(engine, 120, seed=2)]

    assert run(observed=True) == run(observed=False)


def test_order_of_calls_and_idle_answer() -> None:
    engine = Engine(tiny())
    recorder = Recorder()
    ReferenceAdapter(engine).attach(recorder)
    engine.add_request(np.arange(5, dtype=np.int32), Sampling(max_tokens=2, stop_at_eos=False))
    drain(engine)
    assert recorder.calls == ["before", "after", "step"] * 2
    assert engine.idle() is False
    recorder.more = True
    assert engine.idle() is True


def test_failed_forward_is_reported_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny())
    recorder = Recorder()
    ReferenceAdapter(engine).attach(recorder)
    engine.add_request(np.arange(5, dtype=np.int32), Sampling())

    def failing(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.runner.model, "forward", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert recorder.calls == ["before", "failed"]


def test_observer_may_stop_the_engine() -> None:
    engine = Engine(tiny())

    def stop(step: StepView) -> None:
        raise ArithmeticError("mode raise")

    recorder = Recorder(stop)
    ReferenceAdapter(engine).attach(recorder)
    engine.add_request(np.arange(5, dtype=np.int32), Sampling())
    with pytest.raises(ArithmeticError, match="mode raise"):
        engine.step()
    assert recorder.faults == []


def test_own_fault_is_reported_and_serving_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(broken: bool) -> tuple[list[int], Recorder]:
        engine = Engine(tiny())
        recorder = Recorder()
        adapter = ReferenceAdapter(engine)
        adapter.attach(recorder)
        if broken:
            monkeypatch.setattr(PrefixDigests, "advance", lambda *_: 1 / 0)
        engine.add_request(np.arange(5, dtype=np.int32), Sampling(max_tokens=4, stop_at_eos=False))
        return drain(engine)[0].output.tolist(), recorder

    expected, _ = run(broken=False)
    output, recorder = run(broken=True)
    assert output == expected
    assert [(part, type(error)) for part, error in recorder.faults] == [("step_view", ZeroDivisionError)] * 4
    assert recorder.calls == ["step"] * 4


def test_prefix_cache_view() -> None:
    engine = Engine(tiny())
    view = ReferenceAdapter(engine).prefix_cache
    text = np.arange(40, dtype=np.int32)
    engine.add_request(text, Sampling(max_tokens=4, stop_at_eos=False))
    finished = drain(engine)[0]
    held = view.cached("full", unlocked_only=False)
    order = held.positions.argsort()
    assert held.positions[order].tolist() == list(range(43))
    assert held.previous[order].tolist() == [-1, *held.slots[order][:-1].tolist()]
    assert view.still_cached("full", held.slots).all()
    engine.add_request(finished.tokens[:44], Sampling(max_tokens=3, stop_at_eos=False))
    engine.step()
    free = view.cached("full", unlocked_only=True)
    assert free.slots.numel() == 0
    everything = view.cached("full", unlocked_only=False)
    assert sorted(everything.slots.tolist()) == sorted(held.slots.tolist())
    drain(engine)
    grown = sorted(view.cached("full", unlocked_only=True).slots.tolist())
    assert set(held.slots.tolist()) < set(grown)


def test_still_cached_sees_eviction_and_reuse() -> None:
    engine = Engine(tiny())
    view = ReferenceAdapter(engine).prefix_cache
    engine.add_request(np.arange(40, dtype=np.int32), Sampling(max_tokens=4, stop_at_eos=False))
    drain(engine)
    slots = view.cached("full", unlocked_only=False).slots
    cache, allocator = engine.scheduler.cache, engine.scheduler.allocator
    for dropped in cache.evict(1):
        allocator.free(dropped)
    assert not view.still_cached("full", slots).any()
    again = allocator.allocate(slots.numel())
    cache.insert(np.arange(again.size, dtype=np.int32), again)
    assert set(again.tolist()) == set(slots.tolist())
    assert not view.still_cached("full", slots).any()
    view.cached("full", unlocked_only=False)
    assert view.still_cached("full", slots).all()


def test_unknown_group_is_refused() -> None:
    adapter = ReferenceAdapter(Engine(tiny()))
    for ask in (
        lambda: adapter.slots_in_use("swa"),
        lambda: adapter.prefix_cache.cached("swa", unlocked_only=False),
        lambda: adapter.prefix_cache.still_cached("swa", torch.zeros(1, dtype=torch.int64)),
    ):
        with pytest.raises(UnsupportedEngine, match="group 'swa'"):
            ask()


def test_second_canary_is_refused() -> None:
    engine = Engine(tiny())
    first = ReferenceAdapter(engine)
    first.attach(Recorder())
    wrapped = dict(vars(engine))
    second = ReferenceAdapter(engine)
    with pytest.raises(UnsupportedEngine, match="wrapped already"):
        second.attach(Recorder())
    with pytest.raises(UnsupportedEngine, match="wrapped already"):
        first.attach(Recorder())
    second.detach()
    assert vars(engine) == wrapped


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "version", "0.9")
    engine = Engine(tiny())
    before = dict(vars(engine))
    with pytest.raises(UnsupportedEngine, match=r"reference engine 0\.9: supported are 1\.0"):
        ReferenceAdapter(engine).attach(Recorder())
    assert vars(engine) == before


class TestRegistry:
    """Engines are recognised by module and class name."""

    def test_finds_the_adapter(self) -> None:
        adapter = adapter_for(Engine(tiny()))
        assert isinstance(adapter, ReferenceAdapter)
        assert (adapter.name, adapter.version) == ("reference", "1.0")

    def test_subclasses_count(self) -> None:
        class Faster(Engine):
            pass

        assert isinstance(adapter_for(Faster(tiny())), ReferenceAdapter)

    def test_unknown_type(self) -> None:
        with pytest.raises(UnsupportedEngine, match=r"type builtins:dict; supported types are .*Engine"):
            adapter_for({})
