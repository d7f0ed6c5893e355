"""Where a forward writes in groups whose tokens are spread over ranks (decode context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from canary_obs.engine_api.views import GroupStep, StepTypes
from canary_obs.engines.vllm.groups import VllmGroup

_MAX_SHOWN = 512  # steps whose counterparts are kept


class ShardedSlots:
    """Slots as in one cache of all ranks: a block has those of every rank, in the order of their tokens.

    vLLM's slot mapping numbers this rank's slots, and skips the tokens of others. Their identities are kept
    all the same, in the slots that the block table gives them: else a token would have no one to chain to.
    Memory is allocated once.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], max_tokens: int, types: StepTypes, device: torch.device
    ) -> None:
        self._groups = {group.view.name: group for group in groups}

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_tokens, dtype=dtype, device=device)

        self._tokens = torch.arange(max_tokens, dtype=types.lengths, device=device)
        self._entries, self._columns, self._local = (column(torch.int64) for _ in range(3))
        self._blocks, self._flags = column(types.slot_table), column(torch.bool)
        self._slots = {name: column(torch.int64) for name in self._groups}
        # By id, with what has it: a batch that repeats is shown as the same one.
        self._shown: dict[int, tuple[dict[str, GroupStep], dict[str, GroupStep]]] = {}

    def steps(
        self, own: dict[str, GroupStep], positions: Tensor, token_starts: Tensor
    ) -> dict[str, GroupStep]:
        """`own`, vLLM's tables and slot mappings, with slots of all ranks in the groups that are spread.

        positions: [num_tokens]; token_starts: [num_requests + 1], of requests in the tables' rows from 0 on.
        The next call overwrites what this one returned.
        """
        for name, group in self._groups.items():
            self._fill(group, own[name], positions, token_starts)
        known = self._shown.get(id(own))
        if known is None or known[0] is not own:
            if len(self._shown) >= _MAX_SHOWN:
                self._shown.clear()
            count = positions.shape[0]
            sharding = {
                name: replace(own[name], out_slots=self._slots[name][:count]) for name in self._groups
            }
            known = self._shown[id(own)] = own, own | sharding
        return known[1]

    def _fill(self, group: VllmGroup, own: GroupStep, positions: Tensor, token_starts: Tensor) -> None:
        count, page, sharding = positions.shape[0], group.view.page_size, group.sharding
        run, ranks = sharding.interleave, sharding.ranks
        entries, columns, local = (memory[:count] for memory in (self._entries, self._columns, self._local))
        blocks, flags, slots = self._blocks[:count], self._flags[:count], self._slots[group.view.name][:count]
        height, width = own.slot_table.shape
        # By the table: the entry of each token's request and position.
        torch.searchsorted(token_starts[1:], self._tokens[:count], right=True, out=entries)
        torch.div(positions, page, rounding_mode="floor", out=columns).clamp_(0, width - 1)
        entries.clamp_(max=height - 1).mul_(width).add_(columns)
        torch.take(own.slot_table, entries, out=blocks)
        torch.remainder(positions, page, out=slots)
        slots.add_(blocks, alpha=page)
        # By vLLM's mapping, of the tokens that are this rank's.
        torch.div(own.out_slots, run, rounding_mode="floor", out=local)
        local.mul_(run * (ranks - 1)).add_(own.out_slots).add_(sharding.first)
        torch.lt(own.out_slots, 0, out=flags)
        local.masked_fill_(flags, -1)
        torch.div(positions, run, rounding_mode="floor", out=columns).remainder_(ranks)
        torch.eq(columns, sharding.rank, out=flags)
        torch.where(flags, local, slots, out=slots)
