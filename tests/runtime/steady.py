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
from canary_obs.engines.toolkit.device_digests import InputDigests
from canary_obs.engines.toolkit.known_tokens import KnownTokens

LAYERS, SLOTS, PAGE, WORDS = 3, 1024, 4, 8


class SteadyAdapter(EngineAdapter):
    """Shows nothing but its one group, whose slots nobody has used."""

    name, version = "steady", "1"
    prefix_cache = RadixPrefixCache({})

    known = False  # whether it shows what a scheduler knows of its tokens

    def __init__(self, memory: Tensor, window: int | None = None) -> None:
        sources = [
            source_from_tensor(memory[layer, part - 1], part, layer)
            for layer in range(LAYERS)
            for part in (Part.K, Part.V)
        ]
        self._groups = (
            GroupView(name="full", num_slots=SLOTS, page_size=PAGE, sources=sources, window=window),
        )
        self.counted, self.scheduled = {"full": 0}, 0

    @property
    def groups(self) -> Sequence[GroupView]:
        return self._groups

    @property
    def step_types(self) -> StepTypes:
        kinds = dict.fromkeys(
            ("slot_table", "rows", "lengths", "input_ids", "positions", "out_slots"), torch.int64
        )
        return StepTypes(**kinds, has_digests=True, expected_ids=None, has_known_tokens=self.known)

    def forwards(self) -> dict[str, int]:
        return self.counted

    def requests_scheduled(self) -> int | None:
        return self.scheduled if self.known else None

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

    def __init__(
        self, requests: int, device: str = "cpu", seed: int = 1, *, window: int | None = None,
        launches: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        """`launches`: digests and the scheduler's tokens are launched by the canary."""
        self._random, self.device = np.random.default_rng(seed), torch.device(device)
        self.memory = torch.zeros((LAYERS, 2, SLOTS, 1, WORDS), dtype=torch.int32, device=device)
        self.adapter = SteadyAdapter(self.memory, window)
        self.adapter.known = launches
        self.known = KnownTokens(requests, self.device) if launches else None
        self.inputs = InputDigests(requests, self.device)
        self._lists = np.zeros((requests, SLOTS), dtype=np.int32)
        given = {"endpoint": IN_PROCESS, "patrol_budget": "off", "idle_sweep": False} | config
        self.canary = attach_adapter(self.adapter, CanaryConfig(**given))
        # Every 5 s a pass over all records counts: on a busy machine a run takes longer than that, or not.
        self.canary.baselines._clock = lambda: 0.0
        self.canary.mark_ready()
        self.pages = SLOTS // PAGE // requests
        self.names = [f"request-{number}" for number in range(requests)]
        self.length = self.compared_early = 0
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
        given = {"digests": self._digests[:requests]}
        if self.known is not None:
            launch, digests = self.inputs.following(requests, self.ids, count, self.lens[:requests])
            columns = self.known.columns(requests)
            given = {"digests": digests, "known_lens": columns.lens, "known_digests": columns.digests}
            given["launches"] = self.known.launches(head=launch)
        return StepView(
            request_ids=self.names[:requests], rows=count[:-1], prefix_lens=self.lens[:requests],
            extend_lens=torch.ones_like(count[:-1]), token_starts=count, input_ids=self.ids[:requests],
            positions=self.positions[:requests], groups={"full": step}, **given,
        )  # fmt: skip

    def _send(self, tokens: Any, place: int) -> None:
        """What the scheduler knows, the newest tokens included, and the digests of the next forward."""
        count, ends = len(self.names), np.full(len(self.names), place)
        chains = self._chains + mix_arrays(tokens, ends)
        self.known.begin(list(self.view.request_ids))
        self.known.note(self.names, np.stack((ends + 1, chains.view(np.int64))))
        self.inputs.set_batch(self.names, self._lists, ends, np.ones(count, dtype=np.int64))
        self.view.launches.due = True

    def step(self, *, between: Any = None, fed: int = 0, lost: bool = False, early: bool = False) -> None:
        """`between`: called between head and tail. `fed`: bits by which the first input id is wrong.

        `lost`: nothing is written. `early`: where it may be, what is overwritten is compared before the view
        has its values.
        """
        canary, count, place = self.canary, len(self.names), self.length
        tokens = self._random.integers(0, 1 << 20, count)
        given = tokens.copy()
        given[0] ^= fed
        slots = self._table[:, place // PAGE].cpu() * PAGE + place % PAGE
        self.adapter.counted["full"] += 1
        self.adapter.scheduled += count
        early = early and canary.may_compare_early(self.view)
        if early:
            canary.before_write(self.view, slots.to(self.device))
            self.compared_early += 1
        self._show(self.ids, given)
        self._show(self.slots, slots.numpy())
        self._show(self._digests, self._chains.view(np.int64))
        self.lens.fill_(place)
        self.positions.fill_(place)
        if self.known is not None:
            self._send(tokens, place)
        if not early:
            canary.before_write(self.view)
        if not lost:
            written = self._random.integers(-(1 << 31), 1 << 31, (LAYERS, 2, count, 1, WORDS))
            self.memory[:, :, slots] = torch.from_numpy(written).int().to(self.device)
        canary.forward_launched(self.view)
        if between is not None:
            between(slots)
        canary.after_forward(self.view)
        assert self.known is None or not self.view.launches.due
        canary.after_step()
        self._chains += mix_arrays(given, np.full(count, place))
        self._lists[:, place] = given
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
