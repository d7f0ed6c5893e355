"""What a bench returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Figures of a run, and what was found that makes them worthless."""

    title: str
    figures: dict[str, Any]  # JSON values
    faults: dict[str, object] = field(default_factory=dict)  # by name; none may be truthy

    @property
    def failed(self) -> dict[str, object]:
        """The faults that happened; the figures count only when there is none."""
        return {name: value for name, value in self.faults.items() if value}
