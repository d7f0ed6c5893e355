"""States of linear attention in SGLang, without it; with a real model: real/test_states.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_kernels.hashing import chain_of
from canary_obs.engine_api.views import StepTypes
from canary_obs.engines.sglang.groups import find_groups
from canary_obs.engines.sglang.physical_slots import PhysicalSlots
from canary_obs.engines.sglang.state_hooks import StateHooks
from canary_obs.engines.sglang.states import StateSteps, slot_of, state_view
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_physical_slots import Allocator

TYPES = StepTypes(
    slot_table=torch.int32, rows=torch.int64, lengths=torch.int64, input_ids=torch.int64,
    positions=torch.int64, out_slots=torch.int64, has_digests=True, expected_ids=None,
)  # fmt: skip
LAYERS, SIZE = 2, 4


class Held(SimpleNamespace):
    """What SGLang calls State: of all layers."""


class Pool:
    """The part of MambaPool that matters."""

    State = Held

    def __init__(self, *, device: str = "cpu", siblings: Any = (), late: Any = None) -> None:
        self.size, self.device = SIZE, device
        self.mamba_cache: Any = Held(
            conv=[torch.zeros(LAYERS, SIZE + 1, 6, 2)],
            temporal=torch.zeros(LAYERS, SIZE + 1, 2, 3),
            mem_usage_bytes=lambda: 640,
        )
        self._slot_siblings, self.replayssm_write_pos = siblings, late
        self.calls: list[tuple[Any, ...]] = []

    def clear_slots(self, indices: torch.Tensor) -> None:
        self.calls.append(("clear", indices.tolist()))

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        self.calls.append(("copy", src_indices.tolist(), dst_indices.tolist()))

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        self.calls.append(("save", indices.tolist()))
        return "conv", "temporal"

    def load_cpu_copy(self, mamba_cache_cpu: Any, indices: torch.Tensor) -> None:
        self.calls.append(("load", mamba_cache_cpu, indices.tolist()))


def requests_of(states: Any = None, *, small: Any = None, buffer: bool = False, late: bool = False) -> Any:
    return SimpleNamespace(
        mamba_pool=states or Pool(), mamba_ckpt_pool=small, enable_mamba_extra_buffer=buffer,
        enable_mamba_extra_buffer_lazy=late, mamba_map={1: 0, 3: 1},
        mamba_allocator=object(), req_index_to_mamba_index_mapping=torch.zeros(8, dtype=torch.int32),
    )  # fmt: skip


def test_every_byte_of_every_layer_has_a_source() -> None:
    view = state_view(requests_of(), rank=1)
    assert (view.name, view.num_slots, view.page_size) == ("state", SIZE + 1, 1)
    found = [(one.layer, one.part.name, one.slot_bytes, one.head_start) for one in view.sources]
    assert found == [(1, "K", 48, 1), (1, "V", 24, 1), (3, "K", 48, 1), (3, "V", 24, 1)]
    assert {one.tensor.data_ptr() for one in view.sources if one.layer == 3} != {
        one.tensor.data_ptr() for one in view.sources if one.layer == 1
    }


def with_drafts() -> Pool:
    pool = Pool()
    pool.mamba_cache = SimpleNamespace(**vars(pool.mamba_cache))
    return pool


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (requests_of(Pool(device="cuda"), buffer=True, late=True), "such buffers that are allocated late"),
        (requests_of(Pool(siblings=[object()])), "together with states of short convolutions"),
        (requests_of(Pool(late=torch.zeros(4))), "ReplaySSM"),
        (requests_of(small=object()), "with copies in 8 bits"),
        (requests_of(buffer=True), "with buffers that forwards fill"),
        (requests_of(with_drafts()), "with drafts"),
    ],
)
def test_states_that_are_not_followed_are_named(given: Any, named: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"states are not followed .*{named}"):
        state_view(given, 0)


def test_buffers_that_forwards_fill_are_followed_on_a_gpu() -> None:
    assert state_view(requests_of(Pool(device="cuda"), buffer=True), 0).name == "state"


@pytest.mark.parametrize("buffer", [False, True])
def test_full_layers_are_protected_with_and_without_states(
    buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canary_obs.engines.sglang.groups._view", lambda *_: SimpleNamespace(name="full"))
    requests = requests_of(buffer=buffer)
    pool = SimpleNamespace(
        mamba_pool=requests.mamba_pool, full_attention_layer_id_mapping={2: 0}, full_kv_pool=object()
    )
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=requests, token_to_kv_pool_allocator=object(),
        layer_info=SimpleNamespace(start_layer=1, end_layer=4),
    )  # fmt: skip
    found = find_groups(runner)
    if not buffer:
        assert [group.view.name for group in found.covered] == ["full", "state"]
        assert found.covered[1].by_row is requests.req_index_to_mamba_index_mapping
        assert found.left_out == ()
        return
    assert [group.view.name for group in found.covered] == ["full"]
    (part,) = found.left_out
    assert (part.what, part.bytes) == ("states of 2 layers of linear attention", 640)
    assert "buffers that forwards fill" in part.reason


def request(slot: int | None) -> Any:
    return SimpleNamespace(kv=SimpleNamespace(mamba_pool_idx=None if slot is None else torch.tensor(slot)))


def test_a_record_goes_where_the_scheduler_says_and_is_read_where_the_layers_look() -> None:
    rows = torch.tensor([0, 3, 1], dtype=torch.int32)
    steps, names = StateSteps(rows, TYPES), ["a", "b"]
    step = steps.step([request(3), request(2)], names)
    assert step.out_slots.tolist() == [3, 2]
    assert step.slot_table.tolist() == [[0], [3], [1]]
    assert step.slot_table.data_ptr() == rows.data_ptr()
    tokens = step.tokens
    assert tokens is not None
    assert (tokens.prefix_lens.tolist(), tokens.extend_lens.tolist()) == ([0, 0], [1, 1])
    first, second = tokens.input_ids.tolist()
    assert first != second
    assert tokens.known_lens is not None
    assert tokens.known_digests is not None
    assert tokens.known_lens.tolist() == [1, 1]
    for number, digest in zip((first, second), tokens.known_digests.tolist(), strict=True):
        assert int(chain_of(torch.tensor([number]))[-1]) == digest
    assert steps.step([request(3), request(2)], names).tokens is tokens
    assert steps.step([request(2)], ["b"]).tokens is not tokens
    assert steps.step([request(None)], ["c"]).out_slots.tolist() == [-1]
    assert slot_of(request(None)) == -1


def test_states_in_unified_memory_are_shown_where_they_lie() -> None:
    rows = torch.tensor([0, 3, 1], dtype=torch.int32)
    allocator = Allocator({3: 5, 2: 4})
    steps, names = StateSteps(rows, TYPES, PhysicalSlots(allocator)), ["a", "b"]
    step = steps.step([request(3), request(2)], names)
    assert step.out_slots.tolist() == [5, 4]
    assert step.slot_table.tolist() == [[0], [5], [0]]
    allocator.virtual_to_physical[3] = 7  # it was moved
    moved = steps.step([request(3), request(None)], names)
    assert moved.out_slots.tolist() == [7, -1]
    assert moved.slot_table.tolist() == [[0], [7], [0]]


class Watching:
    """An observer, and the order of what it is told among the pool's own calls."""

    state_interval, adoptions = 1, 0

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def told(group: str, *given: Any) -> Any:
            self.calls.append(
                (name, group, *(getattr(each, "tolist", lambda each=each: each)() for each in given))
            )
            return torch.tensor([[9] * 4]) if name == "records_of" else None

        return told


class InOrder:
    """An order of checks that notes when the engine is made to wait."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls, self.inside = calls, 0

    @contextmanager
    def in_order(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def precede(self) -> None:
        assert not self.inside
        self.calls.append(("wait",))


def test_changes_are_announced_around_the_call_that_makes_them() -> None:
    pool, patches = Pool(), MethodPatches()
    calls = pool.calls

    class Runner:
        req_to_token_pool = SimpleNamespace(mamba_pool=pool)

        def _maybe_execute_deferred_mamba_cow_and_clear(self, batch: Any) -> None:
            pool.clear_slots(torch.tensor([batch], dtype=torch.int32))

        def forward(self, batch: Any, more: str) -> str:
            calls.append(("forward", batch))
            return more

    runner = Runner()
    on_a_cpu = SimpleNamespace(states=None, tracked=None)
    StateHooks(runner, Watching(calls), InOrder(calls), on_a_cpu).wrap(patches)  # type: ignore[arg-type]
    assert runner.forward(4, more="answer") == "answer"
    assert calls == [
        ("before_load", "state", [4]), ("wait",), ("clear", [4]), ("invalidated", "state", [4]),
        ("forward", 4),
    ]  # fmt: skip
    calls.clear()
    pool.copy_from(torch.tensor([1]), torch.tensor([2]))
    assert calls == [
        ("before_load", "state", [2]), ("wait",), ("copy", [1], [2]), ("copied", "state", [1], [2])
    ]  # fmt: skip
    calls.clear()
    pool.load_cpu_copy("copy", torch.tensor([3]))
    assert calls == [
        ("before_load", "state", [3]), ("wait",), ("load", "copy", [3]), ("received", "state", [3])
    ]  # fmt: skip
    calls.clear()
    kept = pool.get_cpu_copy(torch.tensor(5))  # as SGLang's pools of both ask for one
    assert kept == ("conv", "temporal")
    pool.load_cpu_copy(kept, torch.tensor(6))
    assert calls == [
        ("save", 5), ("records_of", "state", [5]), ("before_load", "state", [6]), ("wait",),
        ("load", kept, 6), ("received", "state", [6], [[9] * 4], "host"),
    ]  # fmt: skip
    patches.restore()
    calls.clear()
    pool.clear_slots(torch.tensor([1]))
    assert calls == [("clear", [1])]
