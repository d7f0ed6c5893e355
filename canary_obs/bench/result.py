"""What a bench returns: figures, what makes them worthless, and what they are judged by."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from canary_obs.bench.environment import environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure that can get better or worse."""

    value: float
    better: Literal["lower", "higher"] = "lower"
    noise: float = 0.0  # by how much runs differ from each other without a reason; in the value's unit
    goal: float | None = None  # the worst value that is good enough; None = there is none

    @property
    def met(self) -> bool:
        """Whether the goal is reached; True without one."""
        return self.goal is None or self.worse_by(self.goal) <= 0.0

    def worse_by(self, than: float) -> float:
        """How much worse the value is than another one; negative when it is better."""
        return self.value - than if self.better == "lower" else than - self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Figures of a run, what was found that makes them worthless, and what they are judged by."""

    bench: str  # of `canary-obs bench`
    title: str
    plan: dict[str, Any]  # JSON values, as the figures are
    figures: dict[str, Any]
    faults: dict[str, object] = field(default_factory=dict)  # by name; none may be truthy
    measures: dict[str, Measure] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=environment)

    @property
    def failed(self) -> dict[str, object]:
        """The faults that happened; the figures count only when there is none."""
        return {name: value for name, value in self.faults.items() if value}

    @property
    def missed(self) -> dict[str, Measure]:
        """The measures whose goal is not reached."""
        return {name: measure for name, measure in self.measures.items() if not measure.met}

    def to_json(self) -> dict[str, Any]:
        """Everything but the title, as it is committed."""
        measures = {name: asdict(measure) | {"met": measure.met} for name, measure in self.measures.items()}
        return {
            "bench": self.bench, "environment": self.environment, "plan": self.plan, "measures": measures,
            "unsound": self.failed, **self.figures,
        }  # fmt: skip
