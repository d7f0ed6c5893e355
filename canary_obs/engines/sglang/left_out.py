"""Parts of SGLang's KV memory that no group shows: the others are protected without them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One pool, or a part of one."""

    what: str  # plural
    bytes: int  # on this rank
    reason: str

    def described(self, total: int) -> str:
        """What is not checked, and why; `total` is the KV bytes of the whole rank."""
        share = self.bytes / total if total else 0.0
        return f"{self.what} are not checked ({share:.1%} of KV bytes): {self.reason}"


def bytes_of(tensors: Iterable[Any]) -> int:
    """Of these tensors together."""
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)
