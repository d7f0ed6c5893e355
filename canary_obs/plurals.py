"""A number and its noun, as people write them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 violation`, `2 violations`; nouns that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
