"""Protect an engine of your own: an adapter for the toy engine. docs/adapters.md explains each part."""

import torch
from torch import Tensor
from toy_engine import PAGE_SIZE, ToyEngine

from canary_kernels.buffers import source_from_tensor
from canary_kernels.hashing import chain_of
from canary_kernels.layout import Part

from canary_obs import (  # isort: skip
    CachedCount, CachedSlots, CanaryConfig, EngineAdapter, GroupStep, GroupView, KVAllocation, Mode,
    Observer, PrefixCache, StepView, install_canary,
)  # fmt: skip


class ToyAdapter(EngineAdapter, PrefixCache):
    name, version = "toy", "1.0"
    groups, prefix_cache = (), None  # properties in the contract; attributes will do

    def __init__(self, engine: ToyEngine) -> None:
        k, v = (source_from_tensor(engine.kv[i], part, layer=0) for i, part in enumerate((Part.K, Part.V)))
        self.groups = (GroupView(name="full", num_slots=64, page_size=PAGE_SIZE, sources=(k, v)),)
        self.engine, self.prefix_cache = engine, self

    def attach(self, observer: Observer) -> None:
        forward, step = self.engine.forward, self.engine.step

        def observed_forward(*batch: Tensor) -> None:
            view = self.view(*batch)
            observer.before_forward(view)
            forward(*batch)
            observer.after_forward(view)

        vars(self.engine).update(forward=observed_forward, step=lambda: (step(), observer.after_step()))

    def detach(self) -> None:
        for name in ("forward", "step"):
            vars(self.engine).pop(name, None)

    def view(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> StepView:
        tokens, prefix_lens = self.engine.tokens, torch.tensor(self.engine.computed)
        extend_lens = torch.tensor([len(ids) for ids in tokens]) - prefix_lens
        starts = torch.nn.functional.pad(extend_lens.cumsum(0), (1, 0))
        chains = [chain_of(torch.tensor(ids))[n] for ids, n in zip(tokens, prefix_lens, strict=True)]
        return StepView(
            request_ids=("a", "b"), rows=torch.arange(2), prefix_lens=prefix_lens, extend_lens=extend_lens,
            token_starts=starts, input_ids=token_ids, positions=positions, digests=torch.stack(chains),
            groups={"full": GroupStep(slot_table=self.engine.block_table, out_slots=slots)},
        )  # fmt: skip

    def cached(self, group: str, *, unlocked_only: bool = False) -> CachedSlots:
        live = [(i, p) for i, count in enumerate(self.engine.computed) for p in range(count)]
        requests, positions = torch.tensor(live, dtype=torch.int64).view(-1, 2).unbind(1)
        slots = self.engine.slots_of(requests, positions)
        return CachedSlots(slots=slots, positions=positions, previous=slots.roll(1).where(positions > 0, -1))

    def count(self, group: str) -> CachedCount:
        return CachedCount(slots=sum(self.engine.computed), removed=0)

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        return torch.ones_like(slots, dtype=torch.bool)

    def allocation(self) -> KVAllocation:
        return KVAllocation(bytes=self.engine.kv.nbytes, layers={("full",): 1})

    def forwards(self) -> dict[str, int]:
        return {"full": self.engine.steps}

    def prefix_hits(self) -> dict[str, int]:
        return {}  # no request starts with another one's slots

    def slots_in_use(self, group: str) -> Tensor:
        return self.cached(group).slots

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        return ("ab"[slot // 32],)


if __name__ == "__main__":
    engine = ToyEngine()
    canary = install_canary(ToyAdapter(engine), CanaryConfig(mode=Mode.RAISE, endpoint="inproc"))
    canary.mark_ready()
    for step in range(20):
        engine.step()  # raises KVCacheViolation: reason=kv_data, ..., part=k, slot=2, position=2, request=a
        if step == 10:
            engine.kv[0, 0, 2, 1, 5] += 1  # one element of one key: page 0, offset 2, head 1
