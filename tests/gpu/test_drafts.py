"""What a target's forward launches for its draft group, on the device: equal to the reference, no wait."""

import random
import warnings

import torch

from canary_kernels.buffers import allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.drafts import DraftMemory, DraftReserve, TargetStep, keep_target
from canary_kernels.layout import RecordState
from canary_kernels.write import reset_slots

KINDS = torch.int32, torch.int32, torch.int64
RESERVE = DraftReserve(ahead=3, limit=500, page_size=16)
SLOTS, REQUESTS, TOKENS = 4096, 64, 1024


class Group:
    """A draft group's memory and records on one device."""

    def __init__(self, backend: Backend, device: str) -> None:
        self.backend = backend
        self.memory = DraftMemory.allocate(REQUESTS, TOKENS, RESERVE, KINDS, torch.device(device))
        self.buffers = allocate_buffers(SLOTS, torch.zeros(1, dtype=torch.int64, device=device))
        self.buffers.records.copy_(torch.arange(SLOTS * 4).view(SLOTS, 4) + 1)

    def begin(self, step: TargetStep) -> torch.Tensor:
        written = keep_target(self.backend, self.memory, step)
        reset_slots(self.backend, self.buffers, written, RecordState.EMPTY)
        return written


def columns(seed: int) -> dict[str, torch.Tensor]:
    """Requests that add up to four tokens each; few of the pool's slots are theirs."""
    draw = random.Random(seed)
    requests = draw.randrange(1, REQUESTS + 1)
    extend = [draw.randrange(1, 5) for _ in range(requests)]
    total, width = sum(extend), 32
    numbers = [draw.randrange(RESERVE.limit) for _ in range(total)]
    table = [[draw.randrange(SLOTS // 16) for _ in range(width)] for _ in range(REQUESTS)]
    return {
        "prefix_lens": torch.tensor([draw.randrange(495) for _ in range(requests)], dtype=torch.int32),
        "extend_lens": torch.tensor(extend, dtype=torch.int32),
        "token_starts": torch.tensor([0, *extend]).cumsum(0).int(),
        "input_ids": torch.tensor(numbers, dtype=torch.int32),
        "positions": torch.tensor(numbers),
        "slot_table": torch.tensor(table, dtype=torch.int32),
        "out_slots": torch.tensor([draw.randrange(-1, SLOTS) for _ in range(total)]),
    }


def test_begin_equals_the_reference_and_neither_waits_nor_allocates():
    host, device = Group(Backend.TORCH, "cpu"), Group(Backend.TRITON, "cuda")
    given = [columns(seed) for seed in range(20)]
    steps = [TargetStep(**{name: value.cuda() for name, value in each.items()}) for each in given]
    device.begin(steps[0])  # compiles
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype, once per process
            torch.cuda.set_sync_debug_mode("error")
        for step in steps:
            last = device.begin(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    for each in given:
        wanted = host.begin(TargetStep(**each))
    assert last.tolist() == wanted.tolist()
    assert torch.equal(device.buffers.records.cpu(), host.buffers.records)
    for name in ("prefix_lens", "extend_lens", "token_starts", "input_ids", "positions"):
        length = given[-1][name].shape[0]
        assert torch.equal(getattr(device.memory, name)[:length].cpu(), given[-1][name]), name
