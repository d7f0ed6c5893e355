"""Engines of one model that prefill, and one that decodes, each over one or more ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from canary_obs.reference_engine.disaggregated.decode import DecodeSide
from canary_obs.reference_engine.disaggregated.links import Link, links_to
from canary_obs.reference_engine.disaggregated.prefill import PrefillSide
from canary_obs.reference_engine.disaggregated.transfer import KVSender
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.model.tensor_parallel import Shard
from canary_obs.reference_engine.settings import EngineConfig


class Cluster:
    """This process's place among the ranks: first those that prefill, then those that decode."""

    def __init__(
        self, rank: int, prefill: int, decode: int, rendezvous: str, prefill_engines: int = 1
    ) -> None:
        """Waits for all ranks. `rendezvous`: an init_method of torch.distributed, as file:///path.

        prefill: ranks of all engines that prefill, which share them equally.
        """
        # One host: the name of the machine need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=prefill + decode)
        self.prefills = rank < prefill
        each = prefill // prefill_engines
        decoder = range(prefill, prefill + decode)
        prefilling = {
            f"prefill-{number}": range(number * each, (number + 1) * each)
            for number in range(prefill_engines)
        }
        self._peers = {"decode": decoder} if self.prefills else prefilling
        for name, ranks in (prefilling | {"decode": decoder}).items():
            group = dist.new_group(list(ranks))  # every rank takes part
            if rank in ranks:
                self.name, self._group = name, group
                self._size, self._place = len(ranks), ranks.index(rank)

    def engine(self, config: EngineConfig) -> Engine:
        """This rank's engine; a shard of it when several ranks share the model."""
        if self._size == 1:
            return Engine(config)
        return Engine(config, Shard(rank=self._place, size=self._size, all_reduce=self._all_reduce))

    def prefill_side(self, engine: Engine, sender: type[KVSender] = KVSender) -> PrefillSide:
        """The engine as the half that computes prompts."""
        (links,) = self._links(engine)
        return PrefillSide(engine, links, sender(engine, links))

    def decode_side(self, engine: Engine) -> DecodeSide:
        """The engine as the half that goes on from them."""
        return DecodeSide(engine, *self._links(engine))

    def close(self) -> None:
        """Leave. The rendezvous cannot be used again."""
        dist.destroy_process_group()

    def _links(self, engine: Engine) -> list[tuple[Link, ...]]:
        """To the ranks of each engine of the other side."""
        held, device = engine.kv_heads, engine.runner.pool.device
        return [
            links_to(held, len(held) * self._size, ranks, device, name) for name, ranks in self._peers.items()
        ]

    def _all_reduce(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=self._group)
        return partial
