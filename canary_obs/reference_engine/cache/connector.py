"""Where KV enters and leaves an engine's pool. Instrumentation wraps these methods."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

NO_METADATA = 0
# Numberings of slots that KV travels under.
FULL_SLOTS, WINDOW_SLOTS = "full", "window"


def entry_slots(ratio: int) -> str:
    """The numbering of the compressed entries of one ratio."""
    return f"c{ratio}"


class KVConnector:
    """Called around every transfer. Metadata travels with the KV of its slots; the engine ignores it.

    `numbering` says what slots are numbers of.
    """

    def kind(self) -> int:
        """Format of the transfer metadata that is sent and understood here; NO_METADATA = none."""
        return NO_METADATA

    def outgoing(self, numbering: str, slots: Tensor, shares: Sequence[range]) -> Tensor | None:
        """int64 [len(shares), n, words]: metadata of slots (int64 [n]) per range of global KV heads."""
        del numbering, slots, shares
        return None

    def reserved(self, numbering: str, slots: Tensor) -> None:
        """Slots (int64 [n]) were taken for KV that is about to arrive; what they held is void."""

    def landed(
        self, numbering: str, slots: Tensor, transfer_metadata: Sequence[Tensor], kind: int, peer: str = ""
    ) -> None:
        """KV arrived in slots (int64 [n]); metadata int64 [n, words] of this kind, one per sender.

        peer: name of the engine that sent it.
        """
