"""Ranks of two engines joined by torch.distributed: messages on the host, KV from device to device."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from canary_obs.reference_engine.model.tensor_parallel import heads_of

Message = TypeVar("Message")


class Link:
    """One rank of the other engine, and the global KV heads that both hold."""

    def __init__(self, peer: int, heads: range, device: torch.device, engine: str = "") -> None:
        """engine: the name of the other engine."""
        self.peer, self.heads, self.engine = peer, heads, engine
        self._device = device

    def send_message(self, message: msgspec.Struct) -> None:
        """Send a message; returns once it may be forgotten here."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
        dist.send(torch.tensor([data.shape[0]]), self.peer)
        dist.send(data, self.peer)

    def receive_message(self, kind: type[Message]) -> Message:
        """The next message; raises msgspec.ValidationError for one of another kind."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, self.peer)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, self.peer)
        return msgspec.msgpack.decode(data.numpy().tobytes(), type=kind)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor from its own device."""
        if tensor.numel():
            dist.send(tensor.contiguous(), self.peer)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape and type, on the engine's device."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            dist.recv(tensor, self.peer)
        return tensor


def links_to(
    heads: range, kv_heads: int, peers: range, device: torch.device, engine: str = ""
) -> tuple[Link, ...]:
    """Links from a rank with these KV heads to every rank of the other engine that holds some of them."""
    links = []
    for number, peer in enumerate(peers):
        theirs = heads_of(kv_heads, number, len(peers))
        common = range(max(heads.start, theirs.start), min(heads.stop, theirs.stop))
        if common:
            links.append(Link(peer, common, device, engine))
    return tuple(links)
