"""Which slots a batch of requests found in the prefix cache, and how many SGLang says it found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, strategies as st

from canary_kernels.buffers import KVSource
from canary_obs.engine_api.views import GroupView
from canary_obs.engines.sglang.groups import SglangGroup
from canary_obs.engines.sglang.prefix_hits import PrefixHits, _each_once
from canary_obs.engines.toolkit.method_patches import MethodPatches

# int32 [4, 12]: row 1 has slots 101 to 112, and so on.
TABLE = (torch.arange(4)[:, None] * 100 + torch.arange(1, 13)).to(torch.int32)
WINDOWED = torch.cat((torch.zeros(105, dtype=torch.int64), torch.arange(105, 500) - 100))  # 0 = none
SOURCE: Any = object.__new__(KVSource)  # not looked into


class Shown:
    """What the observer was given."""

    def __init__(self) -> None:
        self.slots: dict[str, list[int]] = {}

    def hit(self, group: str, slots: torch.Tensor) -> None:
        assert slots.dtype is torch.int64
        self.slots[group] = slots.tolist()


def group(name: str, *, sources: bool = True, window: int | None = None, **more: Any) -> SglangGroup:
    view: Any = SimpleNamespace(name=name, sources=(SOURCE,) if sources else (), window=window)
    assert {"name", "sources", "window"} <= GroupView.__dataclass_fields__.keys()
    return SglangGroup(view=view, allocator=None, **more)


def hits(*groups: SglangGroup) -> PrefixHits:
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=TABLE))
    return PrefixHits(runner, groups or (group("full"),))


def request(row: int, chunk: int = 1) -> Any:
    return SimpleNamespace(kv=SimpleNamespace(holds_kv=True, req_pool_idx=row), extend_batch_idx=chunk)


def batch(*admitted: tuple[Any, int], found: int, mode: str = "EXTEND", decoding: Any = None) -> Any:
    """Of requests and their tokens before it; `found`: by SGLang's count."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        reqs=[one for one, _ in admitted],
        prefix_lens=[tokens for _, tokens in admitted],
        decoding_reqs=decoding,
        prefill_stats=SimpleNamespace(log_hit_tokens=found),
    )


def test_of_each_kind_of_group() -> None:
    """Windows of 4 tokens: the next one reads 3. Entries of 4 tokens: two whole ones of 9."""
    windowed = group("swa", window=4, own_slots=WINDOWED)
    found = hits(
        group("full"),
        windowed,
        group("c4", ratio=4),
        group("bare", sources=False),
        group("state", by_row=TABLE),
    )
    found.admit(batch((request(1), 9), found=9))
    assert found.waiting
    found.show(shown := Shown())  # type: ignore[arg-type]
    assert not found.waiting
    assert shown.slots == {"full": [*range(101, 110)], "swa": [7, 8, 9], "c4": [104 // 4, 108 // 4]}
    assert found.counted == {"full": 9, "swa": 3, "c4": 2, "bare": 0, "state": 0}


def test_a_position_of_a_window_without_a_slot_is_counted() -> None:
    found = hits(group("swa", window=8, own_slots=WINDOWED))
    found.admit(batch((request(1), 7), found=7))
    found.show(shown := Shown())  # type: ignore[arg-type]
    assert (shown.slots, found.counted) == ({"swa": [-1, -1, -1, -1, 5, 6, 7]}, {"swa": 7})


def test_later_chunks_and_requests_that_decode_are_no_hits() -> None:
    found, decoding = hits(), request(3)
    admitted = (request(1), 4), (request(2, chunk=2), 8), (decoding, 11), (request(0), 0)
    found.admit(batch(*admitted, found=4, mode="MIXED", decoding=[decoding]))
    found.show(shown := Shown())  # type: ignore[arg-type]
    assert (shown.slots, found.counted) == ({"full": [101, 102, 103, 104]}, {"full": 4})
    found.admit(batch((request(1), 5), found=0, mode="DECODE"))
    assert not found.waiting


def test_what_was_not_shown_of_the_last_batch_is_not_shown_with_the_next() -> None:
    found = hits()
    found.admit(batch((request(1), 4), found=4))
    found.admit(batch((request(2), 2), found=2))
    found.show(shown := Shown())  # type: ignore[arg-type]
    assert (shown.slots, found.counted) == ({"full": [201, 202]}, {"full": 6})


class DecodeServer:
    """Whose requests come from another server."""

    def __init__(self, *batches: Any) -> None:
        self.server_args = SimpleNamespace(disaggregation_mode="decode")
        self.running_batch = SimpleNamespace(reqs=[])
        self.batches = [*batches]

    def get_new_prebuilt_batch(self, running_batch: Any) -> Any:
        assert running_batch == "running"
        return self.batches.pop(0)


def test_a_decode_servers_own_hits_are_shown_with_the_next_forward() -> None:
    found, patches = hits(group("full"), group("swa", window=4, own_slots=WINDOWED)), MethodPatches()
    come = [batch((request(row, chunk=0), tokens), found=99) for row, tokens in ((1, 7), (2, 0), (3, 2))]
    server: Any = DecodeServer(come[0], None, *come[1:])
    found.wrap(patches, server, object())  # type: ignore[arg-type]
    assert [server.get_new_prebuilt_batch("running") for _ in range(4)] == [come[0], None, *come[1:]]
    found.admit(batch((come[0].reqs[0], 8), found=99, mode="DECODE"))
    found.show(shown := Shown())  # type: ignore[arg-type]
    assert shown.slots["full"] == [*range(101, 108), 301, 302]
    assert found.counted == {"full": 9, "swa": 3 + 2}
    patches.restore()
    assert "get_new_prebuilt_batch" not in vars(server)


def test_a_decode_servers_request_that_nobody_saw_come_is_counted_once() -> None:
    """Its hits are then more than were shown. One that was running before is not one of them."""
    found, server = hits(group("full"), group("swa", window=4, own_slots=WINDOWED)), DecodeServer()
    before, unseen = request(1), request(2)
    before.prefix_len, unseen.prefix_indices = 9, torch.arange(7)  # SGLang 0.5.23, and 0.5.16
    server.running_batch.reqs.append(before)
    found.wrap(MethodPatches(), server, object())  # type: ignore[arg-type]
    for _ in range(2):
        found.admit(batch((before, 0), (unseen, 0), found=0, mode="DECODE"))
    assert (found.waiting, found.counted) == (False, {"full": 7, "swa": 3})


@given(st.lists(st.integers(-1, 20), min_size=1))
def test_each_slot_once(slots: list[int]) -> None:
    found = _each_once(torch.tensor(slots)).numpy()
    assert found.shape == (len(slots),)
    assert np.array_equal(np.unique(found[found >= 0]), np.unique([slot for slot in slots if slot >= 0]))
    assert len(found[found >= 0]) == len({slot for slot in slots if slot >= 0})
