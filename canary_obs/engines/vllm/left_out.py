"""KV cache groups of vLLM that cannot be checked: the others are protected without them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from canary_obs.errors import UnsupportedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One group, or a part of one, that no GroupView shows."""

    number: int  # index in kv_cache_groups and in the block tables
    layers: tuple[str, ...]  # vLLM's names
    bytes: int  # of KV in these layers, without padding, on this rank
    reason: str

    def described(self, total: int) -> str:
        """What is not checked, and why; `total` is the KV bytes of the whole rank."""
        share = self.bytes / total if total else 0.0
        return (
            f"KV cache group {self.number} is not checked ({share:.1%} of KV bytes, "
            f"{len(self.layers)} layers): {self.reason}"
        )


def check_something_is_left(found: int, left_out: Iterable[LeftOut]) -> None:
    """Raises UnsupportedEngine when `found`, the number of groups to check, is 0 for reasons known."""
    reasons = [group.reason for group in left_out]
    if reasons and not found:
        raise UnsupportedEngine(f"no KV cache group of this engine can be checked: {'; '.join(reasons)}")
