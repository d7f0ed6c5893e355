"""KV of a request from one engine's pool to another's, region by region, one-sided: the sender says where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from canary_obs.reference_engine.disaggregated.links import Link
from canary_obs.reference_engine.disaggregated.messages import Manifest, RegionMove
from canary_obs.reference_engine.disaggregated.regions import Places, Slots, check_links, regions
from canary_obs.reference_engine.engine import Engine


class KVSender:
    """Reads an engine's pool and sends what was granted."""

    def __init__(self, engine: Engine, links: Sequence[Link]) -> None:
        check_links(engine, links)
        self._engine, self._links = engine, tuple(links)

    def send(self, source: Places, granted: Sequence[Places]) -> None:
        """Send slots `source` to the slots that each link's receiver granted, then their metadata."""
        connector, shares = self._engine.connector, tuple(link.heads for link in self._links)
        metadata = [
            connector.outgoing(numbering, self._on_device(slots), shares)
            for numbering, slots in source.items()
        ]
        words = [0 if found is None else found.shape[2] for found in metadata]
        for number, (link, target) in enumerate(zip(self._links, granted, strict=True)):
            moves = tuple(self.moves(source, target))
            listed = [RegionMove(region=region, slots=write.tolist()) for region, _, write in moves]
            link.send_message(Manifest(moves=listed, words=words))
            held = regions(self._engine, link.heads)
            for region, read, _ in moves:
                held[region].send(link, self._on_device(read))
            for found in metadata:
                if found is not None:
                    link.send(found[number])

    def moves(self, source: Places, target: Places) -> Iterator[tuple[int, Slots, Slots]]:
        """Every copy to make: region, slots to read here, slots to write there."""
        for number, region in enumerate(regions(self._engine, self._engine.kv_heads)):
            yield number, source[region.numbering], target[region.numbering]

    def _on_device(self, slots: Slots) -> Tensor:
        return torch.from_numpy(slots).to(self._engine.runner.pool.device)


class KVReceiver:
    """Writes into an engine's pool what a sender sends."""

    def __init__(self, engine: Engine, links: Sequence[Link]) -> None:
        check_links(engine, links)
        self._engine, self._links = engine, tuple(links)

    def receive(self, granted: Places, kind: int) -> None:
        """Take one request's KV and metadata of this kind from every link, for the slots granted to it."""
        pool = self._engine.runner.pool
        shares = [self._from(link, granted) for link in self._links]
        for numbering, slots in granted.items():
            self._engine.connector.landed(
                numbering,
                torch.from_numpy(slots).to(pool.device),
                [share[numbering] for share in shares if numbering in share],
                kind,
                self._links[0].engine,
            )

    def _from(self, link: Link, granted: Places) -> dict[str, Tensor]:
        """Metadata by numbering."""
        device = self._engine.runner.pool.device
        manifest = link.receive_message(Manifest)
        held = regions(self._engine, link.heads)
        for move in manifest.moves:
            held[move.region].receive(link, torch.tensor(move.slots, dtype=torch.int64, device=device))
        return {
            numbering: link.receive((slots.size, words), torch.int64)
            for (numbering, slots), words in zip(granted.items(), manifest.words, strict=True)
            if words
        }
