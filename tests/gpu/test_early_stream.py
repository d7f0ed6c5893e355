"""Work on the early stream runs while a forward does, and after what it has to wait for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.early_stream import EarlyStream
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.runtime.device import replays
from tests.runtime.test_replays import EVENTS, run

DEVICE = torch.device("cuda", 0)
CYCLES = 20_000_000  # some 10 ms


def remembered(stream: torch.cuda.Stream) -> ForwardStream:
    made = ForwardStream(DEVICE)
    with torch.cuda.stream(stream):
        made.remember()
    return made


def test_it_waits_for_the_scheduler_and_not_for_the_forward() -> None:
    scheduler, forward = torch.cuda.Stream(), torch.cuda.Stream()
    early, done = EarlyStream(DEVICE, remembered(scheduler)), torch.Event(DEVICE)
    slots = torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE)
    seen = torch.zeros((2, slots.shape[0]), dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(20 * CYCLES)
    with torch.cuda.stream(scheduler):
        torch.cuda._sleep(CYCLES)
        slots.fill_(1)
    with torch.cuda.stream(forward):
        with early:
            seen[0].copy_(slots)
            done.record()
        early.join()
        slots.fill_(2)
    done.synchronize()
    assert not forward.query()
    torch.cuda.synchronize()
    assert seen[0].eq(1).all()


def test_what_is_launched_after_the_join_waits_for_it() -> None:
    early = EarlyStream(DEVICE, remembered(torch.cuda.Stream()))
    slots = torch.ones(1 << 16, dtype=torch.int64, device=DEVICE)
    seen = torch.zeros_like(slots)
    torch.cuda.synchronize()
    with early:
        torch.cuda._sleep(CYCLES)
        seen.copy_(slots)
    early.join()
    slots.fill_(2)
    torch.cuda.synchronize()
    assert seen.eq(1).all()


def test_it_waits_for_the_checks_before_the_last_ones() -> None:
    early, side = EarlyStream(DEVICE, remembered(torch.cuda.Stream())), SideStream(DEVICE, enabled=True)
    done, values = torch.Event(DEVICE), torch.zeros((2, 1 << 16), dtype=torch.int64, device=DEVICE)
    seen = torch.zeros_like(values)
    torch.cuda.synchronize()
    with side.after_all:
        torch.cuda._sleep(CYCLES)
        values[0].fill_(1)
        early.checked()
        torch.cuda._sleep(20 * CYCLES)
        values[1].fill_(1)
        early.checked()
    with early:
        seen.copy_(values)
        done.record()
    done.synchronize()
    assert (int(seen[0].min()), int(seen[1].max())) == (1, 0)
    torch.cuda.synchronize()


def test_the_scheduler_waits_for_what_was_kept() -> None:
    scheduler = torch.cuda.Stream()
    early, side = EarlyStream(DEVICE, remembered(scheduler)), SideStream(DEVICE, enabled=True)
    table = torch.ones(1 << 16, dtype=torch.int64, device=DEVICE)
    kept = torch.zeros_like(table)
    torch.cuda.synchronize()
    with side.after_all:
        torch.cuda._sleep(CYCLES)
        kept.copy_(table)
        early.kept()
    with torch.cuda.stream(scheduler):
        table.fill_(2)
    torch.cuda.synchronize()
    assert kept.eq(1).all()


def test_it_is_none_of_the_engines_streams() -> None:
    """Torch hands out 32 in turn."""
    taken = [torch.cuda.Stream() for _ in range(20)]
    others = [remembered(stream) for stream in taken]
    early = EarlyStream(DEVICE, others[0], others[1:])
    for _ in range(8):
        with early:
            assert early.stream_id not in {stream.stream_id for stream in taken}
        early._stream, early._apart = torch.Stream(DEVICE), False


@pytest.mark.parametrize("shown", [{}, {"window": 3}], ids=str)
def test_early_comparisons_find_what_others_find(
    monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]
) -> None:
    monkeypatch.setattr(replays, "REPEATS", 3)
    monkeypatch.setattr(replays, "FORWARDS_WAITED", 0)
    for seed in range(4):
        draw = random.Random(seed)
        events = [draw.choice(EVENTS) for _ in range(60)]
        given = {"backend": "triton", "device": "cuda"} | shown
        early = run(events, replaying=True, early=True, **given)
        assert early[0] == run(events, replaying=False, **given)[0]
        assert early[1] > 40  # the clock is in these graphs
