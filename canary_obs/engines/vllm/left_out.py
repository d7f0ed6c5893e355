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
    part_of: int = 0  # layers of the group; 0 = it is left out whole

    def described(self, total: int) -> str:
        """What is not checked, and why; `total` is the KV bytes of the whole rank."""
        share = self.bytes / total if total else 0.0
        count, where = len(self.layers), f"KV cache group {self.number}"
        if self.part_of:
            where, layers = f"a part of {where}", f"{count} of its {self.part_of} layers"
        else:
            layers = f"{count} layers"
        return f"{where} is not checked ({share:.1%} of KV bytes, {layers}): {self.reason}"


def check_something_is_left(found: int, left_out: Iterable[LeftOut]) -> None:
    """Raises UnsupportedEngine when `found`, the number of groups to check, is 0 for reasons known."""
    reasons = [group.reason for group in left_out]
    if reasons and not found:
        raise UnsupportedEngine(f"no KV cache group of this engine can be checked: {'; '.join(reasons)}")
