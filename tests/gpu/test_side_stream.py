"""Work on the side stream runs after what was queued before it, and before what is queued after the join."""

import torch

from canary_obs.engines.toolkit.check_stream import STEPS_PER_QUERY, CheckStream
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream

DEVICE = torch.device("cuda", 0)
CYCLES = 20_000_000  # some 10 ms
ROUNDS = 20


def test_order() -> None:
    side_stream = SideStream(DEVICE, enabled=True)
    slots = torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE)
    seen = torch.zeros((ROUNDS, slots.shape[0]), dtype=torch.int64, device=DEVICE)
    # Unordered, the copies would be over long before the first fill.
    torch.cuda._sleep(CYCLES)
    for number in range(ROUNDS):
        side_stream.join()
        slots.fill_(number + 1)
        with side_stream.after_all:
            torch.cuda._sleep(CYCLES // ROUNDS)
            seen[number].copy_(slots)
    torch.cuda.synchronize()
    assert seen.eq(torch.arange(1, ROUNDS + 1, device=DEVICE)[:, None]).all()


def test_work_after_the_mark_does_not_wait_for_what_follows_the_mark() -> None:
    side_stream = SideStream(DEVICE, enabled=True)
    values = torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE)
    seen = torch.zeros((3, values.shape[0]), dtype=torch.int64, device=DEVICE)
    early = torch.Event(DEVICE)
    side_stream.join()
    torch.cuda._sleep(CYCLES // 10)
    values.fill_(1)
    side_stream.mark()
    torch.cuda._sleep(10 * CYCLES)  # the forward
    with side_stream.after_mark:
        seen[0].copy_(values)
        early.record()
    with side_stream.unordered:
        seen[1].copy_(values)
    early.synchronize()
    assert not torch.cuda.default_stream(DEVICE).query()  # the forward is still running
    with side_stream.after_all:
        seen[2].copy_(values)
    side_stream.join()
    values.fill_(2)
    torch.cuda.synchronize()
    assert seen.eq(1).all()


def test_disabled_it_is_the_current_stream() -> None:
    side_stream = SideStream(DEVICE, enabled=False)
    with side_stream.after_all:
        assert torch.cuda.current_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
    side_stream.join()


def test_checks_in_line_and_aside_see_what_their_step_wrote() -> None:
    forward_stream, side_stream = ForwardStream(DEVICE), SideStream(DEVICE, enabled=True)
    forward_stream.remember()
    chosen = CheckStream(forward_stream, side_stream)
    own = torch.cuda.current_stream(DEVICE)
    slots = torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE)
    seen = torch.zeros((8 * STEPS_PER_QUERY, slots.shape[0]), dtype=torch.int64, device=DEVICE)
    in_line = []
    for number in range(seen.shape[0]):
        waits = number // STEPS_PER_QUERY % 2 == 0
        if waits:
            torch.cuda.synchronize()
        chosen.begin_step(few_tokens=True)
        if chosen.join_due:
            chosen.join()
        slots.fill_(number + 1)
        with chosen.entered():
            in_line.append(torch.cuda.current_stream(DEVICE) == own)
            torch.cuda._sleep(CYCLES // 100)
            seen[number].copy_(slots)
        if not waits:
            torch.cuda._sleep(CYCLES // 10)
    torch.cuda.synchronize()
    assert seen.eq(torch.arange(1, seen.shape[0] + 1, device=DEVICE)[:, None]).all()
    assert 3 * STEPS_PER_QUERY <= sum(in_line) <= 5 * STEPS_PER_QUERY
