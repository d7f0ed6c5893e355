"""A seeded defect: one place of the source changed, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs exactly once in the file; tests are pytest node ids, any of which must fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutants(file: str, *changes: tuple[str, str, str]) -> tuple[Mutant, ...]:
    """Mutants of one file: (old, new, test)."""
    return tuple(Mutant(file, old, new, (test,)) for old, new, test in changes)
