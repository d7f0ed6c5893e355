"""Work aside sees what was queued before it, and is done before what is queued after the join."""

import torch

from canary_obs.engines.aside import Aside

DEVICE = torch.device("cuda", 0)
CYCLES = 20_000_000  # some 10 ms
ROUNDS = 20


def test_order() -> None:
    aside = Aside(DEVICE, wanted=True)
    slots = torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE)
    seen = torch.zeros((ROUNDS, slots.shape[0]), dtype=torch.int64, device=DEVICE)
    # Unordered, the copies would be over long before the first fill.
    torch.cuda._sleep(CYCLES)
    for number in range(ROUNDS):
        aside.join()
        slots.fill_(number + 1)
        with aside.entered():
            torch.cuda._sleep(CYCLES // ROUNDS)
            seen[number].copy_(slots)
    torch.cuda.synchronize()
    assert seen.eq(torch.arange(1, ROUNDS + 1, device=DEVICE)[:, None]).all()


def test_unwanted_is_the_current_stream() -> None:
    aside = Aside(DEVICE, wanted=False)
    with aside.entered():
        assert torch.cuda.current_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
    aside.join()
