"""What healing asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from canary_obs.healing.plan import Block, CacheView


class Actor(CacheView, Protocol):
    """An engine that can be healed. Called between two steps; raises what the engine raises."""

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool; those of several pools together."""

    @property
    def copies_elsewhere(self) -> str | None:
        """Where copies of cached blocks may be that cannot be taken back; None = nowhere."""

    def evict(self, blocks: Iterable[Block]) -> None:
        """Take blocks out of the prefix cache, and with them what copies of them can be reached."""

    def recompute(self, request: str) -> int:
        """Compute a request again from its last cached token; tokens that it had computed."""

    def end(self, request: str) -> None:
        """End a request with an error that its client sees."""

    def bar(self, request: str) -> None:
        """Cache nothing any more that this request computes."""

    def quarantine(self, block: Block) -> None:
        """Never give this block to a request again, until `release`.

        Raises QuarantineRefused, with nothing done, where the engine could not serve every request then.
        """

    def release(self, block: Block) -> None:
        """Let the pool have a block back."""
