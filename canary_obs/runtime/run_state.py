"""What changes from step to step and is read by several parts of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

LONG_STEP_SECONDS = 1.0
_SECONDS_TO_CATCH_UP = 5.0  # after a long step: until copies that waited for it have been read
HOOKS = ("head", "tail", "sweep", "patrol", "pump", "adapter")  # labels of kv_canary_overhead_seconds


@dataclass(slots=True, kw_only=True)
class RunState:
    """Written by CanaryRuntime, the step scheduler and commands."""

    step: int = 0  # forwards since mark_ready
    step_seconds: float = 0.0  # engine time between the ends of consecutive steps, summed
    armed: bool = False  # False = hooks do nothing
    paused: bool = False  # True = no sweeps and no patrol
    last_task: str = "none"  # that a step ran, on a GPU
    ready_at: float = 0.0  # time.monotonic() of mark_ready
    last_step_end: float | None = None  # time.monotonic(); None = no step since the engine was idle
    long_step_seconds: float = 0.0  # of the last step that took over LONG_STEP_SECONDS
    long_step_end: float = float("-inf")  # time.monotonic()
    overhead: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HOOKS, 0.0))  # host seconds

    def excused_seconds(self, now: float) -> float:
        """How much older than usual the host's counters may be at `now`, because of a step that lasted."""
        return self.long_step_seconds if now - self.long_step_end <= _SECONDS_TO_CATCH_UP else 0.0
