"""Where KV enters and leaves an engine's pool: the seam that whoever watches the engine wraps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

NO_METADATA = 0


class KVConnector:
    """Called around every move. A sidecar travels with the KV of its slots; the engine does not read it."""

    def kind(self) -> int:
        """What kind of sidecar is sent and understood here; NO_SIDECAR = none."""
        return NO_METADATA

    def outgoing(self, slots: Tensor, shares: Sequence[range]) -> Tensor | None:
        """int64 [len(shares), n, words]: sidecars of slots (int64 [n]) for each range of global KV heads."""
        del slots, shares
        return None

    def reserved(self, slots: Tensor) -> None:
        """Slots (int64 [n]) were taken for KV that is about to arrive; what they held is void."""

    def landed(self, slots: Tensor, transfer_metadata: Sequence[Tensor], kind: int) -> None:
        """KV arrived in slots (int64 [n]); sidecars int64 [n, words], of this kind, one from each sender."""
