"""An engine without a model whose batch never changes: a token of each request in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canary_kernels.buffers import source_from_tensor
from canary_kernels.hashing import mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR, Part
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.views import GroupStep, GroupView, StepTypes, StepView
from canary_obs.engines.reference.prefix_cache import RadixPrefixCache
from canary_obs.engines.toolkit.attachment import attach_adapter

LAYERS, SLOTS, PAGE, WORDS = 3, 1024, 4, 8


class SteadyAdapter(EngineAdapter):
    """Shows nothing but its one group, whose slots nobody has used."""

    name, version = "steady", "1"
    prefix_cache = RadixPrefixCache({})

    def __init__(self, memory: Tensor) -> None:
        sources = [
            source_from_tensor(memory[layer, part - 1], part, layer)
            for layer in range(LAYERS)
            for part in (Part.K, Part.V)
        ]
        self._groups = (GroupView(name="full", num_slots=SLOTS, page_size=PAGE, sources=sources),)
        self.counted = {"full": 0}

    @property
    def groups(self) -> Sequence[GroupView]:
        return self._groups

    @property
    def step_types(self) -> StepTypes:
        kinds = dict.fromkeys(
            ("slot_table", "rows", "lengths", "input_ids", "positions", "out_slots"), torch.int64
        )
        return StepTypes(**kinds, has_digests=True, expected_ids=None)

    def forwards(self) -> dict[str, int]:
        return self.counted

    def slots_in_use(self, group: str) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        return ()

    def attach(self, observer: Any) -> None:
        pass

    def detach(self) -> None:
        pass


class Steady:
    """Requests with pages of their own; all tensors of the view stay where they are."""

    def __init__(self, requests: int, device: str = "cpu", seed: int = 1, **config: Any) -> None:
        self._random, self.device = np.random.default_rng(seed), torch.device(device)
        self.memory = torch.zeros((LAYERS, 2, SLOTS, 1, WORDS), dtype=torch.int32, device=device)
        self.adapter = SteadyAdapter(self.memory)
        given = {"endpoint": IN_PROCESS, "patrol_budget": "off", "idle_sweep": False} | config
        self.canary = attach_adapter(self.adapter, CanaryConfig(**given))
        self.canary.mark_ready()
        self.pages = SLOTS // PAGE // requests
        self.names = [f"request-{number}" for number in range(requests)]
        self.length = 0
        self._table = torch.arange(requests * self.pages, device=device).view(requests, self.pages)
        self._chains = np.full(requests, CHAIN_ANCHOR, dtype=np.uint64)
        self.lens, self.ids, self.positions, self.slots, self._digests = (
            torch.zeros(requests, dtype=torch.int64, device=device) for _ in range(5)
        )
        self.view = self.view_of(requests)

    def view_of(self, requests: int) -> StepView:
        """The first requests as the batch of a forward."""
        step = GroupStep(slot_table=self._table, out_slots=self.slots[:requests])
        count = torch.arange(requests + 1, device=self.device)
        return StepView(
            request_ids=self.names[:requests], rows=count[:-1], prefix_lens=self.lens[:requests],
            extend_lens=torch.ones_like(count[:-1]), token_starts=count, input_ids=self.ids[:requests],
            positions=self.positions[:requests], digests=self._digests[:requests], groups={"full": step},
        )  # fmt: skip

    def step(self, *, between: Any = None, fed: int = 0, lost: bool = False) -> None:
        """`between`: called between head and tail. `fed`: bits by which the first input id is wrong.

        `lost`: nothing is written.
        """
        canary, count, place = self.canary, len(self.names), self.length
        tokens = self._random.integers(0, 1 << 20, count)
        given = tokens.copy()
        given[0] ^= fed
        slots = self._table[:, place // PAGE].cpu() * PAGE + place % PAGE
        self._show(self.ids, given)
        self._show(self.slots, slots.numpy())
        self._show(self._digests, self._chains.view(np.int64))
        self.lens.fill_(place)
        self.positions.fill_(place)
        self.adapter.counted["full"] += 1
        canary.before_write(self.view)
        if not lost:
            written = self._random.integers(-(1 << 31), 1 << 31, (LAYERS, 2, count, 1, WORDS))
            self.memory[:, :, slots] = torch.from_numpy(written).int().to(self.device)
        canary.forward_launched(self.view)
        if between is not None:
            between(slots)
        canary.after_forward(self.view)
        canary.after_step()
        self._chains += mix_arrays(given, np.full(count, place))
        self.length += 1

    def _show(self, column: Tensor, values: Any) -> None:
        column.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def found(self) -> dict[str, Any]:
        """Records, counters and violations by now."""
        state, health = self.canary.state, self.canary.health
        # On a GPU events of a lane have no order.
        log = [] if state.clock.is_cuda else state.log_of(state.flat).tolist()
        return {
            "records": state.groups[0].memory[:-1].tolist(), "counters": state.counters.tolist(), "log": log,
            "launched": health.launched_runs, "faults": health.faults,
        }  # fmt: skip

    def close(self) -> None:
        """Detach the canary."""
        self.canary.detach()
